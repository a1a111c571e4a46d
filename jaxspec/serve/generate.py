"""Host. From prompts to outputs: one engine request a prompt, merged as they come, dropped when the client leaves."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar, runtime_checkable

from starlette.requests import ClientDisconnect, Request

from jaxspec.config.resolve import ResolvedConfig
from jaxspec.metrics.prometheus import EngineMetrics
from jaxspec.sampling.params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer

T = TypeVar("T")


@runtime_checkable
class ServedEngine(Protocol):
    """What the server needs of an engine; `jaxspec.engine.AsyncEngine` is one.

    generate yields outputs whose `outputs[i]` carry `text_delta` and `token_ids_delta`; closing the iterator aborts
    the request. tokenizer (None when the model has none), config, metrics and compiles may be read once is_ready.
    """

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_healthy(self) -> bool: ...

    @property
    def step_seconds(self) -> float:
        """How long the engine has been in its present step; 0.0 while it is in none."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def config(self) -> ResolvedConfig: ...

    @property
    def metrics(self) -> EngineMetrics: ...

    @property
    def compiles_after_ready(self) -> int: ...

    def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, priority: int = 0
    ) -> AsyncIterator[Any]: ...


async def run_prompts(
    engine: ServedEngine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    request_id: str,
    *,
    priority: int = 0,
    cache_salt: str | None = None,
) -> AsyncGenerator[tuple[int, Any], None]:
    """(prompt's index, output) of all prompts, in the order the engine gives them.

    Whatever ends this iterator, also its closing, ends every request it started.
    """
    arrived: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

    async def pump(index: int, ids: list[int]) -> None:
        """Pass on the prompt's outputs, then None, or the error that ended it."""
        end = None
        try:
            prompt = {"prompt_token_ids": ids} | ({} if cache_salt is None else {"cache_salt": cache_salt})
            outputs = engine.generate(prompt, params, f"{request_id}-{index}", priority)
            async with aclosing(outputs):  # pyright: ignore[reportArgumentType]
                async for output in outputs:
                    arrived.put_nowait((index, output))
        except Exception as error:
            end = error
        arrived.put_nowait((index, end))

    pumps = [asyncio.create_task(pump(index, ids)) for index, ids in enumerate(prompts)]
    num_running = len(pumps)
    try:
        while num_running:
            index, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield index, item
    finally:
        await _end(pumps)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of work, or ClientDisconnect, with work cancelled, as soon as the client is gone."""
    doing = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientDisconnect()
    finally:
        await _end([doing, watching])


def new_id(prefix: str) -> str:
    """An id for a response."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
