"""Host. An engine whose answers can be worked out by hand, behind the real routes, and a client for them."""

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from jaxspec.config.resolve import ResolvedConfig
from jaxspec.config.server import ServerConfig
from jaxspec.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenPiece
from jaxspec.errors import RequestError
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.metrics.prometheus import EngineMetrics
from jaxspec.serve.app import create_app
from jaxspec.serve.server import bind, http_server
from jaxspec.text.tokenizer import Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz ?!:\n"
ANSWER = "the quick brown fox jumps over the lazy dog!"
NUM_SPEC_TOKENS = 8
LIMIT = 80
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def letter_tokenizer(letters: str = LETTERS, chat_template: str = CHAT_TEMPLATE) -> Tokenizer:
    """One token a letter, ids in the letters' order."""
    backend = tokenizers.Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, chat_template=chat_template)


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def logprob_of(letter: str, num_top: int) -> dict[int, Logprob]:
    """The letter has -2 and rank 2; beside it stand the first letters, "a" as impossible."""
    entry = {LETTERS.index(letter): Logprob(-2.0, 2, letter)}
    for place in range(num_top):
        if place != LETTERS.index(letter):
            entry[place] = Logprob(-1.0 - place if place else -float("inf"), place + 1, LETTERS[place])
    return entry


class FakeEngine:
    """Every answer is `answer`, choice j's starting at its j-th letter, `block` letters a step.

    All but the last letter of a step were drafted and accepted. running and aborted hold request ids. While `hold` is
    set, answers stop after their first step.
    """

    def __init__(
        self,
        block: int = 3,
        max_model_len: int = LIMIT,
        *,
        answer: str = ANSWER,
        letters: str = LETTERS,
        chat_template: str = CHAT_TEMPLATE,
    ):
        self.answer, self.letters = answer, letters
        self.step_seconds = 0.0
        self.is_ready = True
        self.is_healthy = True
        self.compiles_after_ready = 0
        self.tokenizer = letter_tokenizer(letters, chat_template)
        # The routes read no other field.
        self.config = ResolvedConfig.model_construct(
            served_model_name="fake", max_model_len=max_model_len, speculative_config=None
        )
        self.metrics = EngineMetrics("fake", NUM_SPEC_TOKENS)
        self.block = block
        self.hold = False
        self.only_holds: str | None = None  # the one request that hold is for
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.prompts: list[list[int]] = []
        self.params: list = []
        self.priorities: list[int] = []
        self.salts: list[str | None] = []
        self.fail_after_steps: int | None = None
        self.failure: Exception = RuntimeError("secret detail")

    def ids(self, text: str) -> list[int]:
        return [self.letters.index(letter) for letter in text]

    async def generate(self, prompt, params, request_id, priority=0):
        self.salts.append(prompt.get("cache_salt"))
        self.priorities.append(priority)
        prompt_ids = prompt["prompt_token_ids"]
        if not all(0 <= token_id < len(self.letters) for token_id in prompt_ids):
            raise RequestError("a prompt token is outside the vocabulary", param="prompt")
        self.prompts.append(prompt_ids)
        self.params.append(params)
        self.running.add(request_id)
        finished = False
        stats = AcceptanceStats(NUM_SPEC_TOKENS)
        try:
            answers = [(self.answer[j:] + self.answer[:j])[: params.max_tokens] for j in range(params.n)]
            longest = max(map(len, answers))
            reason = "length" if params.max_tokens < len(self.answer) else "stop"
            for step, start in enumerate(range(0, longest, self.block)):
                if step == self.fail_after_steps:
                    raise self.failure
                end = min(start + self.block, longest)
                for _ in answers:
                    counts = (end - start - 1, end - start - 1, end - start)
                    stats.observe(*counts)
                    self.metrics.observe_round(*counts)
                finished = end == longest
                outputs = [
                    CompletionOutput(
                        index=j,
                        text=answer[:end],
                        token_ids=self.ids(answer[:end]),
                        finish_reason=reason if finished else None,
                        text_delta=answer[start:end],
                        token_ids_delta=self.ids(answer[start:end]),
                        pieces_delta=[
                            TokenPiece(self.letters.index(letter), letter, "accepted" if place < end - 1 else "bonus")
                            for place, letter in enumerate(answer[start:end], start)
                        ],
                        logprobs=None
                        if params.logprobs is None
                        else [logprob_of(c, params.logprobs) for c in answer[:end]],
                    )
                    for j, answer in enumerate(answers)
                ]
                if finished:
                    self.running.discard(request_id)
                yield RequestOutput(
                    request_id,
                    None,
                    prompt_ids,
                    outputs,
                    finished,
                    RequestMetrics(0.0, None, None, stats.as_dict()),
                    None
                    if params.prompt_logprobs is None
                    else [None, *(logprob_of(LETTERS[i], params.prompt_logprobs) for i in prompt_ids[1:])],
                    num_cached_tokens=min(4, len(prompt_ids) - 1),
                )
                await asyncio.sleep(0)
                while self.hold and self.only_holds in (None, request_id):
                    await asyncio.sleep(0.005)
        finally:
            if not finished:
                self.running.discard(request_id)
                self.aborted.append(request_id)


class Client:
    """Plain HTTP to one server."""

    def __init__(self, port: int):
        self.port = port

    def request(self, method: str, path: str, body=None, headers=None) -> SimpleNamespace:
        """status, headers, text, and json where the body is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, raw, headers or {})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        is_json = (response.getheader("content-type") or "").startswith("application/json")
        return SimpleNamespace(
            status=response.status, headers=response.headers, text=text, json=json.loads(text) if is_json else None
        )

    def get(self, path: str, **kwargs) -> SimpleNamespace:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, body, **kwargs) -> SimpleNamespace:
        return self.request("POST", path, body, **kwargs)

    def stream(self, path: str, body: dict) -> list[dict]:
        """The chunks of a streamed answer; the last event must be [DONE]."""
        response = self.post(path, body | {"stream": True})
        assert response.status == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]


@contextmanager
def serving(engine, config: ServerConfig | None = None, tracer=None) -> Iterator[Client]:
    """The real application over an engine, on a free port of this machine."""
    listening = bind("127.0.0.1", 0)
    config = config or ServerConfig()
    server = http_server(config)
    server.config.app = create_app(engine, config, tracer=tracer)
    server.config.timeout_graceful_shutdown = 2
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield Client(listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
