"""Host. `AsyncEngine`: the engine on a thread of its own, its outputs as async iterators; what the server runs on."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from jaxspec.config.engine import EngineConfig
from jaxspec.config.resolve import ResolvedConfig
from jaxspec.engine.build import build
from jaxspec.engine.core import EngineCore
from jaxspec.engine.journal import open_journal
from jaxspec.engine.outputs import RequestOutput
from jaxspec.engine.probe import probe_at_start
from jaxspec.engine.request import Prompt
from jaxspec.errors import EngineDeadError
from jaxspec.metrics.acceptance import log_line
from jaxspec.metrics.prometheus import EngineMetrics
from jaxspec.proposers.base import HostProposer, Proposer
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors import LogitsProcessor
from jaxspec.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0


@dataclass(eq=False)
class _Client:
    """Where a request's outputs go: a queue of the event loop that asked."""

    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[RequestOutput | Exception] = field(default_factory=asyncio.Queue)

    def send(self, item: RequestOutput | Exception) -> None:
        _send_all([(self, item)])


def _send_all(items: Sequence[tuple[_Client, RequestOutput | Exception]]) -> None:
    """Hand items over, and wake each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Client, RequestOutput | Exception]]] = {}
    for client, item in items:
        by_loop.setdefault(client.loop, []).append((client, item))
    for loop, own in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, own)
        except RuntimeError:
            logger.debug("an event loop closed before its request ended")


def _put_all(items: Sequence[tuple[_Client, RequestOutput | Exception]]) -> None:
    for client, item in items:
        client.outputs.put_nowait(item)


@dataclass(frozen=True)
class _Command:
    """What the engine's thread is to do between steps, and who is told if it ends before."""

    run: Callable[[EngineCore], None]
    client: _Client | None = None


class AsyncEngine:
    """Owns one thread, in which the engine is built and driven. All methods may be called from any thread.

    Commands reach the thread through one queue and are taken between steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        proposer: Proposer | HostProposer | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        startup_probe_tokens: int = 0,
    ):
        """config: as the user gave it; proposer, logits_processors: as `Engine`'s; startup_probe_tokens: tokens an
        answer by which the drafter is judged before the engine is ready, 0: not at all."""
        self._config = config
        self._proposer = proposer
        self._logits_processors = tuple(logits_processors)
        self._startup_probe_tokens = startup_probe_tokens
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._asking = threading.Lock()  # so that no command enters the queue once the thread has stopped
        self._clients: dict[str, _Client] = {}  # touched by the engine's thread alone
        self._core: EngineCore | None = None
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._stopped = threading.Event()
        self._step_began: float | None = None  # on time.monotonic's clock; None between steps
        self._thread = threading.Thread(target=self._run, name="jaxspec-engine", daemon=True)

    def start(self) -> "AsyncEngine":
        """Begin to build; `is_ready` turns true when every program is compiled."""
        self._thread.start()
        return self

    def wait_until_ready(self) -> None:
        """Block until ready.

        Raises:
            Whatever building raised.
        """
        self._ready.wait()
        if self._core is None and self._failure is not None:
            raise self._failure

    @property
    def is_ready(self) -> bool:
        return self._core is not None

    @property
    def is_healthy(self) -> bool:
        """False once building failed or the thread has ended."""
        return self._failure is None and not self._stopped.is_set()

    @property
    def step_seconds(self) -> float:
        """How long the engine has been in its present step, in seconds; 0.0 while it is in none."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._built().parts.tokenizer

    @property
    def config(self) -> ResolvedConfig:
        return self._built().config

    @property
    def metrics(self) -> EngineMetrics:
        return self._built().metrics

    @property
    def compiles_after_ready(self) -> int:
        return self._built().compiles_after_ready

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Answer one prompt, yielding whenever tokens came; closing the iterator aborts the request.

        priority: lower ones run first, where the scheduling policy is "priority".

        Raises:
            RequestError, CapacityError: the request is refused.
            EngineDeadError: the engine is not running, or died under the request.
        """
        if self._core is not None and params.structured_outputs is not None:
            # Here, not on the engine's thread: a large grammar must not keep the others waiting.
            await asyncio.to_thread(self._core.compile_grammar, params)
        client = _Client(asyncio.get_running_loop())

        def add(core: EngineCore) -> None:
            self._add(core, client, request_id, prompt, params, priority)

        if not self.is_ready or not self._ask(add, client):
            raise EngineDeadError("the engine is not running; start one and wait until it is ready")
        is_open = True
        try:
            while is_open:
                item = await client.outputs.get()
                if isinstance(item, Exception):
                    is_open = False
                    raise item
                is_open = not item.finished
                yield item
        finally:
            if is_open:
                self.abort(request_id, client)

    def abort(self, request_id: str, client: _Client | None = None) -> None:
        """End a request; with a client, only if the id is still that client's."""

        def command(core: EngineCore) -> None:
            if client is None or self._clients.get(request_id) is client:
                request = core.abort(request_id)
                owner = self._clients.pop(request_id, None)
                if request is not None and owner is not None:
                    owner.send(request.output())

        self._ask(command)

    def shutdown(self) -> None:
        """End the thread after the step it is in; open requests end with EngineDeadError."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _ask(self, run: Callable[[EngineCore], None], client: _Client | None = None) -> bool:
        """Queue a command; False when the thread has stopped and nobody would take it."""
        with self._asking:
            if self._stopped.is_set():
                return False
            self._commands.put(_Command(run, client))
            return True

    def _built(self) -> EngineCore:
        if self._core is None:
            raise EngineDeadError("the engine is not ready; start it and wait until it is")
        return self._core

    def _run(self) -> None:
        hosts = None
        try:
            parts = build(self._config, custom_proposer=self._proposer, logits_processors=self._logits_processors)
            hosts = parts.hosts
            journal = open_journal(
                self._config,
                parts,
                has_own_code=self._proposer is not None or bool(self._logits_processors),
                startup_probe_tokens=self._startup_probe_tokens,
            )
            core = EngineCore(parts, journal)
            if self._startup_probe_tokens:
                probe_at_start(core, self._startup_probe_tokens)
            self._core = core
            self._ready.set()
            logger.info("ready")
            self._drive(core)
            if hosts is not None:
                hosts.end()
        except BaseException as error:  # whatever it was, clients must hear of it
            self._failure = error
            logger.exception("the engine has failed")
            if hosts is not None:
                hosts.fail(error)
        finally:
            with self._asking:
                self._stopped.set()
            self._ready.set()
            self._drain()

    def _drive(self, core: EngineCore) -> None:
        logged, before = time.monotonic(), core.metrics.acceptance()
        while self._take_commands(core):
            self._step_began = time.monotonic()
            touched = core.step()
            self._step_began = None
            items = []
            for request in touched:
                client = self._clients.get(request.request_id)
                if client is not None:
                    items.append((client, request.error or request.output()))
                    if request.is_finished:
                        del self._clients[request.request_id]
            _send_all(items)
            if (now := time.monotonic()) - logged >= LOG_EVERY_S:
                current = core.metrics.acceptance()
                if current.num_drafts > before.num_drafts:
                    logger.info(log_line(current, before, now - logged))
                logged, before = now, current

    def _take_commands(self, core: EngineCore) -> bool:
        """Run what is asked; wait for something to do when nothing runs. False when told to stop."""
        left = self._commands.qsize()  # not what comes meanwhile: a flood of requests must not stop those that run
        while left > 0 or not core.has_work:
            command = self._commands.get()
            if command is None:
                return False
            command.run(core)
            left -= 1
        return True

    def _add(
        self,
        core: EngineCore,
        client: _Client,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
    ) -> None:
        try:
            core.add_request(request_id, prompt, params, priority)
        except Exception as error:  # refused, or never foreseen: this request's fault, and no other's
            client.send(error)
        else:
            self._clients[request_id] = client

    def _drain(self) -> None:
        """Tell everyone who waits, and whose command was not taken any more."""
        error = EngineDeadError("the engine has stopped; its log says why")
        for client in self._clients.values():
            client.send(error)
        self._clients.clear()
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None and command.client is not None:
                command.client.send(error)
