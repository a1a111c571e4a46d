"""Host. The routes: OpenAI's completions and chat, models, tokenize, health and metrics, over one engine."""

import asyncio
import functools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from jaxspec.config.server import ServerConfig
from jaxspec.errors import ConfigError, RequestError
from jaxspec.serve.access import AccessLog, check_key, keys_of
from jaxspec.serve.errors import HttpError, JsonResponse, error_response
from jaxspec.serve.generate import ServedEngine, run_prompts, unless_disconnected
from jaxspec.serve.openapi import document, document_page
from jaxspec.serve.profiling import Profiler
from jaxspec.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    Parsed,
    TokenizeRequest,
    parse,
    sampling_params,
)
from jaxspec.serve.responses import Echo, Envelope, events, whole
from jaxspec.serve.speculation import speculation_report
from jaxspec.serve.tools import ToolUse, check_template_knows_tools
from jaxspec.serve.tracing import RequestTracer
from jaxspec.text.answer_parts import END_THINK, END_TOOL_CALL, THINK, TOOL_CALL, AnswerParser, ReasoningSplitter
from jaxspec.text.tokenizer import Tokenizer

MAX_CHOICES = 256
LARGE_BODY_BYTES = 32 * 1024  # from here on a body is read off the event loop
PAGE = Path(__file__).with_name("playground.html")

Handler = Callable[[Request], Awaitable[Response]]


class Server:
    """The engine and its config behind the routes. Nothing here changes after construction."""

    def __init__(self, engine: ServedEngine, config: ServerConfig, tracer: RequestTracer | None = None):
        """Raises: ConfigError for a chat template that cannot be read."""
        self.engine = engine
        self.config = config
        self.tracer = tracer
        self.started = int(time.time())
        self.chat_template = read_chat_template(config.chat_template)

    async def health(self, request: Request) -> Response:
        """200 when requests are served; 503 while the engine warms up, when one of its steps never ends, and after it
        died."""
        if not self.engine.is_healthy:
            return JsonResponse({"status": "failed"}, status_code=503)
        if not self.engine.is_ready:
            return JsonResponse({"status": "starting"}, status_code=503)
        if self.engine.step_seconds > self.config.stuck_after_s:
            return JsonResponse({"status": "stuck", "step_seconds": self.engine.step_seconds}, status_code=503)
        return JsonResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text; nothing yet while the engine starts."""
        text = b""
        if self.engine.is_ready:
            self.engine.metrics.set_compiles_after_ready(self.engine.compiles_after_ready)
            text = self.engine.metrics.render()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        """Of this server, and of JAX below it."""
        return JsonResponse({"version": version("jaxspec"), "jax": version("jax")})

    async def speculation(self, request: Request) -> Response:
        """What is configured, and how many drafts were kept since the start."""
        self._check_ready()
        return JsonResponse(speculation_report(self.engine.config, self.engine.metrics.acceptance()))

    async def models(self, request: Request) -> Response:
        """The one model there is."""
        self._check_ready()
        return JsonResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The same by its name, which may hold slashes."""
        self._check_ready()
        self._check_model(request.path_params["name"])
        return JsonResponse(self._model())

    def _model(self) -> dict[str, Any]:
        name, limit = self.engine.config.served_model_name, self.engine.config.max_model_len
        model = {"id": name, "object": "model", "created": self.started, "owned_by": "jaxspec", "root": name}
        return model | {"parent": None, "max_model_len": limit}

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        wanted = await self._parsed(request, CompletionRequest)
        given = await anyio.to_thread.run_sync(wanted.prompts) if request.state.is_large else wanted.prompts()
        if len(given) > MAX_CHOICES:
            raise RequestError(
                f"prompt must not hold more than {MAX_CHOICES} prompts, got {len(given)}; send fewer", param="prompt"
            )
        prompts = [
            one if isinstance(one, list) else await anyio.to_thread.run_sync(self._tokenizer().encode, one)
            for one in given
        ]
        echoes: tuple[Echo, ...] = ()
        if wanted.echo:
            echoes = await anyio.to_thread.run_sync(lambda: tuple(map(self._echo, given, prompts)))
        return await self._answer(request, wanted, prompts, "prompt", echoes=echoes)

    def _echo(self, given: str | list[int], ids: list[int]) -> Echo:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            return Echo("", "")
        known = [token_id for token_id in ids if 0 <= token_id < 2**31]  # what is none the engine refuses
        text = given if isinstance(given, str) else tokenizer.decode(known, skip_special_tokens=False)
        return Echo(text, tokenizer.decode(known[:1], skip_special_tokens=False))

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        wanted = await self._parsed(request, ChatRequest)
        tools = wanted.tool_use()
        text, ids = await self._chat_prompt(wanted, tools)
        return await self._answer(request, wanted, [ids], "messages", tools=tools, prompt_text=text)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        wanted = await self._parsed(request, TokenizeRequest)
        if (wanted.prompt is None) == (wanted.messages is None):
            raise RequestError("send either prompt or messages", param="prompt")
        tokenizer = self._tokenizer()
        if wanted.prompt is None:
            tools = ToolUse(tuple(wanted.tools), "auto", True) if wanted.tools else None
            _, ids = await self._chat_prompt(wanted, tools)
        else:
            ids = await anyio.to_thread.run_sync(tokenizer.encode, wanted.prompt, wanted.add_special_tokens)
        body = {"count": len(ids), "max_model_len": self.engine.config.max_model_len, "tokens": ids}
        if wanted.return_token_strs:
            body["token_strs"] = [tokenizer.id_to_token(token_id) for token_id in ids]
        return JsonResponse(body)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        wanted = await self._parsed(request, DetokenizeRequest)
        if any(not 0 <= token_id < 2**31 for token_id in wanted.tokens):
            raise RequestError("tokens must be ids of 0 or more, within 32 bits", param="tokens")
        decode = self._tokenizer().decode
        text = await anyio.to_thread.run_sync(lambda: decode(wanted.tokens, skip_special_tokens=False))
        return JsonResponse({"prompt": text})

    async def _answer(
        self,
        request: Request,
        wanted: GenerationRequest,
        prompts: list[list[int]],
        prompt_field: str,
        *,
        echoes: tuple[Echo, ...] = (),
        tools: ToolUse | None = None,
        prompt_text: str = "",
    ) -> Response:
        limit = self.engine.config.max_model_len
        room = limit - max(map(len, prompts))
        if room < 1 or not all(prompts):
            raise RequestError(
                f"{prompt_field} must have 1 to {limit - 1} tokens, got {max(map(len, prompts)) if room < 1 else 0}; "
                f"the model's limit of {limit} includes the answer",
                param=prompt_field,
            )
        reasons = self._begins_with_reasoning(prompt_text)
        settle = functools.partial(
            sampling_params,
            wanted,
            room,
            tools,
            END_THINK if reasons else None,
            reads_special_tokens=isinstance(wanted, ChatRequest) and self._reads_special_tokens(tools),
        )
        params = await anyio.to_thread.run_sync(settle) if request.state.is_large else settle()
        if params.n * len(prompts) > MAX_CHOICES:
            raise RequestError(
                f"n={params.n} for {len(prompts)} prompts must not exceed {MAX_CHOICES} choices; send fewer", param="n"
            )
        if wanted.stream and params.prompt_logprobs is not None and not echoes:
            raise RequestError("prompt_logprobs do not stream; leave one of the two out", param="prompt_logprobs")
        envelope = Envelope(
            model=self.engine.config.served_model_name,
            is_chat=isinstance(wanted, ChatRequest),
            num_choices_per_prompt=params.n,
            prompt_lens=tuple(map(len, prompts)),
            num_logprobs=params.logprobs,
            echoes=echoes,
            is_echo_alone=isinstance(wanted, CompletionRequest) and wanted.is_echo_alone,
            returns_origins=wanted.return_token_origins,
            new_parser=functools.partial(self._new_parser, tools, reasons),
        )
        request.state.facts = {"response_id": envelope.id, "prompt_tokens": sum(envelope.prompt_lens)}
        outputs = run_prompts(
            self.engine, prompts, params, envelope.id, priority=wanted.priority, cache_salt=wanted.cache_salt
        )
        outputs = within(outputs, self.config.request_timeout_s)
        if self.tracer is not None:
            outputs = self.tracer.traced(
                outputs,
                headers=request.headers,
                model=envelope.model,
                request_id=envelope.id,
                params=params,
                prompt_lens=envelope.prompt_lens,
            )
        if not wanted.stream:
            async with aclosing(outputs):
                body = await unless_disconnected(request, whole(envelope, outputs))
            request.state.facts["completion_tokens"] = body["usage"]["completion_tokens"]
            return JsonResponse(body)
        # The first output comes before the headers, so that a refusal by the engine still has its own status.
        first = await unless_disconnected(request, _first(outputs))
        options = wanted.options
        lines = events(
            envelope,
            first,
            outputs,
            includes_usage=options.include_usage,
            continuous_usage=options.continuous_usage_stats,
            by_token=options.one_token_per_chunk,
        )
        return EventStream(lines, outputs)

    def _begins_with_reasoning(self, prompt_text: str) -> bool:
        """Whether an answer to this chat is reasoning from its first token on, without a tag that says so."""
        end, parser = prompt_text.rstrip(), self.config.reasoning_parser
        return bool(parser) and (end.endswith(THINK) or (parser == "deepseek_r1" and not end.endswith(END_THINK)))

    def _reads_special_tokens(self, tools: ToolUse | None) -> bool:
        """Whether a tag that is looked for is a special token of this model, as it is of some."""
        tags = (TOOL_CALL, END_TOOL_CALL) if tools is not None and not tools.is_forced else ()
        if self.config.reasoning_parser is not None:
            tags = (*tags, THINK, END_THINK)
        tokenizer = self._tokenizer()
        return any(tokenizer.backend.token_to_id(tag) in tokenizer.special_ids for tag in tags)

    def _new_parser(self, tools: ToolUse | None, begins_with_reasoning: bool) -> AnswerParser:
        """What reads one answer to a chat."""
        calls = None if tools is None else tools.parser(self.config.tool_call_parser, self._template() or "")
        if self.config.reasoning_parser is None:
            return AnswerParser(calls)
        return AnswerParser(calls, ReasoningSplitter(is_open=begins_with_reasoning))

    async def _chat_prompt(self, wanted: ChatRequest | TokenizeRequest, tools: ToolUse | None) -> tuple[str, list[int]]:
        """A conversation's text and ids."""
        reserved = {"messages", "add_generation_prompt", "chat_template", "tools"} & wanted.chat_template_kwargs.keys()
        if reserved:
            raise RequestError(f"chat_template_kwargs must not set {sorted(reserved)}", param="chat_template_kwargs")
        messages = [message.as_template_input(index) for index, message in enumerate(wanted.messages or ())]
        tokenizer = self._tokenizer()
        variables = dict(wanted.chat_template_kwargs)
        if tools is not None:
            check_template_knows_tools(self._template())
            variables["tools"] = tools.for_template()

        def encode() -> tuple[str, list[int]]:
            text = tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=wanted.add_generation_prompt,
                chat_template=self.chat_template,
                **variables,
            )
            return text, tokenizer.encode(text, add_special_tokens=False)

        return await anyio.to_thread.run_sync(encode)

    def _template(self) -> str | None:
        return self.chat_template or self._tokenizer().chat_template

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

    async def _parsed(self, request: Request, kind: type[Parsed]) -> Parsed:
        """The body as a request of that kind. A large one is read on another thread: the event loop never waits."""
        raw = await self._body(request)
        request.state.is_large = len(raw) >= LARGE_BODY_BYTES

        def read() -> Parsed:
            return parse(kind, _json_object(raw))

        wanted = await anyio.to_thread.run_sync(read) if request.state.is_large else read()
        self._check_model(getattr(wanted, "model", None))
        return wanted

    async def _body(self, request: Request) -> bytes:
        self._check_ready()
        limit, seconds = self.config.max_body_bytes, self.config.body_timeout_s
        raw = bytearray()
        length = request.headers.get("content-length") or "0"
        if length.isdecimal() and int(length[:20]) <= limit:
            try:
                with anyio.fail_after(seconds):
                    async for piece in request.stream():
                        raw += piece
                        if len(raw) > limit:
                            break
                    else:
                        return bytes(raw)
            except TimeoutError:
                raise HttpError(
                    408, f"the body did not arrive within {seconds:g} s; send it", headers={"Connection": "close"}
                ) from None
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


def create_app(
    engine: ServedEngine, config: ServerConfig, lifespan: Any = None, tracer: RequestTracer | None = None
) -> Starlette:
    """The ASGI application over an engine, started or not: until it is ready, routes that need it answer 503.
    tracer: told of every request that is answered.

    Raises: ConfigError for a file that the config names and that cannot be read.
    """
    server = Server(engine, config, tracer)
    keys = keys_of(config)

    def answered(handler: Handler) -> Handler:
        """Turn whatever is raised into a response: the server survives."""

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody listens; the log shows it
            except Exception as error:
                return await error_response(request, error, retry_after_s=config.retry_after_s)

        return answer

    def guarded(handler: Handler) -> Handler:
        """Ask for the key, if there is one."""

        async def checked(request: Request) -> Response:
            check_key(keys, request.headers.get("authorization", ""))
            return await handler(request)

        return answered(checked)

    async def page(request: Request) -> Response:
        """The playground."""
        return _static(PAGE.read_bytes())

    async def openapi(request: Request) -> Response:
        """The document that describes all this."""
        return JsonResponse(document(is_guarded=bool(keys)))

    async def docs(request: Request) -> Response:
        """The same for people."""
        return _static(document_page(document(is_guarded=bool(keys))))

    routes = [
        Route("/", page),
        Route("/docs", docs),
        Route("/openapi.json", openapi),
        Route("/health", answered(server.health)),
        Route("/metrics", answered(server.metrics)),
        Route("/version", answered(server.version)),
        Route("/v1/models", guarded(server.models)),
        Route("/v1/models/{name:path}", guarded(server.model)),
        Route("/v1/speculation", guarded(server.speculation)),
        Route("/v1/completions", guarded(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", guarded(server.chat_completions), methods=["POST"]),
        Route("/tokenize", guarded(server.tokenize), methods=["POST"]),
        Route("/detokenize", guarded(server.detokenize), methods=["POST"]),
    ]
    if config.profiler_dir is not None:
        profiler = Profiler(config.profiler_dir)
        routes += [
            Route("/start_profile", guarded(profiler.start), methods=["POST"]),
            Route("/stop_profile", guarded(profiler.stop), methods=["POST"]),
        ]
    middleware = [Middleware(AccessLog)]
    if config.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        )
    # Paths and methods that no route takes are refused by the framework; only their shape is ours.
    handlers: Mapping[Any, Any] = {HTTPException: error_response}
    return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware, lifespan=lifespan)


async def within(outputs: Any, seconds: float | None) -> AsyncGenerator[Any, None]:
    """The outputs, as long as they come in time; closing this closes them.

    Raises: HttpError with status 504 once the time is over.
    """
    end = None if seconds is None else asyncio.get_running_loop().time() + seconds
    async with aclosing(outputs):
        while True:
            try:
                async with asyncio.timeout_at(end):
                    item = await anext(outputs)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise HttpError(
                    504,
                    f"no answer within the server's request_timeout_s={seconds:g}; ask for fewer tokens",
                    code="timeout",
                    headers={"x-should-retry": "false"},  # OpenAI's clients would ask again, as long
                ) from None
            yield item


def _static(body: bytes) -> Response:
    """A page of our own: nothing in it comes from elsewhere, and the browser is to see to that."""
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    )
    headers = {"Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"}
    return Response(body, media_type="text/html", headers=headers)


def read_chat_template(given: str | None) -> str | None:
    """A template's text: given itself, where it looks like one, or what a file holds.

    Raises: ConfigError for a file that cannot be read.
    """
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read chat_template {given!r} ({error}); give a file or a template's text") from None


def _json_object(raw: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(raw, parse_constant=_no_constant, object_pairs_hook=_one_key_once)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body must be JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise HttpError(400, f"the body must be a JSON object, got {type(body).__name__}")
    return body


def _one_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, none of whose keys would be ignored."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r:.80} stands twice in an object")
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON number")


async def _first(outputs: AsyncIterator[Any]) -> list[Any]:
    """The first item, or none."""
    try:
        return [await anext(outputs)]
    except StopAsyncIteration:
        return []
