"""Host. The routes: OpenAI's completions and chat, models, tokenize, health and metrics, over one engine."""

import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from jaxspec.config.engine import ServerConfig
from jaxspec.errors import RequestError
from jaxspec.serve.errors import HttpError, JsonResponse, error_response
from jaxspec.serve.generate import ServedEngine, run_prompts, unless_disconnected
from jaxspec.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
    sampling_params,
)
from jaxspec.serve.responses import Envelope, events, whole
from jaxspec.text.tokenizer import Tokenizer

MAX_CHOICES = 256

Handler = Callable[[Request], Awaitable[Response]]


class Server:
    """The engine and its config behind the routes. Nothing here changes after construction."""

    def __init__(self, engine: ServedEngine, config: ServerConfig):
        self.engine = engine
        self.config = config
        self.started = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 when requests are served; 503 while the engine warms up and after it died."""
        if not self.engine.is_healthy:
            return JsonResponse({"status": "failed"}, status_code=503)
        if not self.engine.is_ready:
            return JsonResponse({"status": "starting"}, status_code=503)
        return JsonResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text; nothing yet while the engine starts."""
        text = b""
        if self.engine.is_ready:
            self.engine.metrics.set_compiles_after_ready(self.engine.compiles_after_ready)
            text = self.engine.metrics.render()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        """The one model there is."""
        self._check_ready()
        name, limit = self.engine.config.served_model_name, self.engine.config.max_model_len
        model = {"id": name, "object": "model", "created": self.started, "owned_by": "jaxspec", "root": name}
        return JsonResponse({"object": "list", "data": [model | {"parent": None, "max_model_len": limit}]})

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        wanted = parse(CompletionRequest, await self._body(request))
        self._check_model(wanted.model)
        prompts = [
            one if isinstance(one, list) else await anyio.to_thread.run_sync(self._tokenizer().encode, one)
            for one in wanted.prompts()
        ]
        return await self._answer(request, wanted, prompts, "prompt")

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        wanted = parse(ChatRequest, await self._body(request))
        self._check_model(wanted.model)
        return await self._answer(request, wanted, [await self._chat_ids(wanted)], "messages")

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        wanted = parse(TokenizeRequest, await self._body(request))
        self._check_model(wanted.model)
        if (wanted.prompt is None) == (wanted.messages is None):
            raise RequestError("send either prompt or messages", param="prompt")
        tokenizer = self._tokenizer()
        if wanted.prompt is None:
            ids = await self._chat_ids(wanted)
        else:
            ids = await anyio.to_thread.run_sync(tokenizer.encode, wanted.prompt, wanted.add_special_tokens)
        body = {"count": len(ids), "max_model_len": self.engine.config.max_model_len, "tokens": ids}
        if wanted.return_token_strs:
            body["token_strs"] = [tokenizer.id_to_token(token_id) for token_id in ids]
        return JsonResponse(body)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        wanted = parse(DetokenizeRequest, await self._body(request))
        self._check_model(wanted.model)
        if any(not 0 <= token_id < 2**31 for token_id in wanted.tokens):
            raise RequestError("tokens must be ids of 0 or more, within 32 bits", param="tokens")
        return JsonResponse({"prompt": self._tokenizer().decode(wanted.tokens, skip_special_tokens=False)})

    async def _answer(
        self, request: Request, wanted: GenerationRequest, prompts: list[list[int]], prompt_field: str
    ) -> Response:
        limit = self.engine.config.max_model_len
        room = limit - max(map(len, prompts))
        if room < 1 or not all(prompts):
            raise RequestError(
                f"{prompt_field} must have 1 to {limit - 1} tokens, got {max(map(len, prompts)) if room < 1 else 0}; "
                f"the model's limit of {limit} includes the answer",
                param=prompt_field,
            )
        params = sampling_params(wanted, room)
        if params.n * len(prompts) > MAX_CHOICES:
            raise RequestError(
                f"n={params.n} for {len(prompts)} prompts must not exceed {MAX_CHOICES} choices; send fewer", param="n"
            )
        if wanted.stream and params.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs do not stream; leave one of the two out", param="prompt_logprobs")
        is_chat = isinstance(wanted, ChatRequest)
        lens = tuple(map(len, prompts))
        envelope = Envelope.new(self.engine.config.served_model_name, is_chat, params.n, lens, params.logprobs)
        outputs = run_prompts(
            self.engine, prompts, params, envelope.id, priority=wanted.priority, cache_salt=wanted.cache_salt
        )
        if not wanted.stream:
            async with aclosing(outputs):
                return JsonResponse(await unless_disconnected(request, whole(envelope, outputs)))
        # The first output comes before the headers, so that a refusal by the engine still has its own status.
        first = await unless_disconnected(request, _first(outputs))
        return EventStream(events(envelope, first, outputs, includes_usage=wanted.includes_usage), outputs)

    async def _chat_ids(self, wanted: ChatRequest | TokenizeRequest) -> list[int]:
        reserved = {"messages", "add_generation_prompt", "chat_template"} & wanted.chat_template_kwargs.keys()
        if reserved:
            raise RequestError(f"chat_template_kwargs must not set {sorted(reserved)}", param="chat_template_kwargs")
        messages = [message.as_template_input() for message in wanted.messages or ()]
        tokenizer = self._tokenizer()

        def encode() -> list[int]:
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=wanted.add_generation_prompt, **wanted.chat_template_kwargs
            )
            return tokenizer.encode(text, add_special_tokens=False)

        return await anyio.to_thread.run_sync(encode)

    def _tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise RequestError("this model has no tokenizer; send token ids to /v1/completions", param="prompt")
        return self.engine.tokenizer

    def _check_ready(self) -> None:
        if not self.engine.is_healthy:
            raise HttpError(503, "the engine has failed; see the server's log")
        if not self.engine.is_ready:
            raise HttpError(503, "the engine is starting; try again when /health says ready")

    def _check_model(self, model: str | None) -> None:
        name = self.engine.config.served_model_name
        if model is not None and model != name:
            message = f"model {model[:200]!r} does not exist; this server has {name!r}"
            raise HttpError(404, message, param="model", code="model_not_found")

    async def _body(self, request: Request) -> Mapping[str, Any]:
        self._check_ready()
        limit = self.config.max_body_bytes
        raw = bytearray()
        if int(request.headers.get("content-length") or 0) <= limit:
            async for piece in request.stream():
                raw += piece
                if len(raw) > limit:
                    break
            else:
                return _json_object(bytes(raw))
        raise HttpError(413, f"the body must not exceed {limit} bytes; send less or raise max_body_bytes")


class EventStream(StreamingResponse):
    """Server-sent events made from outputs, which are closed when the response ends, however it ends.

    A client that leaves thereby aborts its requests at once, not when the garbage collector comes by.
    """

    def __init__(self, body: AsyncIterator[str], outputs: Any):
        super().__init__(body, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._outputs = outputs

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with aclosing(self._outputs):
            await super().__call__(scope, receive, send)


def create_app(engine: ServedEngine, config: ServerConfig, lifespan: Any = None) -> Starlette:
    """The ASGI application over an engine, started or not: until it is ready, routes that need it answer 503."""
    server = Server(engine, config)

    def guarded(handler: Handler) -> Handler:
        """Ask for the key, if there is one, and turn whatever is raised into a response: the server survives."""

        async def answered(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            try:
                if config.api_key and not hmac.compare_digest(given.encode(), f"Bearer {config.api_key}".encode()):
                    raise HttpError(401, "this server needs its API key as 'Authorization: Bearer KEY'")
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody listens; the access log shows it
            except Exception as error:
                return await error_response(request, error)

        return answered

    routes = [
        Route("/health", server.health),
        Route("/metrics", server.metrics),
        Route("/v1/models", guarded(server.models)),
        Route("/v1/completions", guarded(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", guarded(server.chat_completions), methods=["POST"]),
        Route("/tokenize", guarded(server.tokenize), methods=["POST"]),
        Route("/detokenize", guarded(server.detokenize), methods=["POST"]),
    ]
    # Paths and methods that no route takes are refused by the framework; only their shape is ours.
    handlers: Mapping[Any, Any] = {HTTPException: error_response}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


def _json_object(raw: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body must be JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise HttpError(400, f"the body must be a JSON object, got {type(body).__name__}")
    return body


async def _first(outputs: AsyncIterator[Any]) -> list[Any]:
    """The first item, or none."""
    try:
        return [await anext(outputs)]
    except StopAsyncIteration:
        return []
