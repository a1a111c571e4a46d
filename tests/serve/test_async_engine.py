"""Host. What the server counts on: who asks is answered, also when the engine's thread ends under the request."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from jaxspec import EngineDeadError, SamplingParams
from jaxspec.config.engine import EngineConfig
from jaxspec.engine import async_engine
from jaxspec.engine.async_engine import AsyncEngine


class HeldCore:
    """Takes requests; its step waits for `may_go_on`, and fails if it has an error to raise."""

    def __init__(self, parts, journal):
        del parts, journal
        self.has_work = False
        self.metrics = SimpleNamespace(acceptance=lambda: None)
        self.is_stepping, self.may_go_on = threading.Event(), threading.Event()
        self.error = None

    def add_request(self, *request):
        del request
        self.has_work = True

    def abort(self, request_id):
        del request_id

    def step(self):
        self.is_stepping.set()
        assert self.may_go_on.wait(10)
        if self.error is not None:
            raise self.error
        return []


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(async_engine, "build", lambda config, **options: SimpleNamespace(hosts=None))
    monkeypatch.setattr(async_engine, "EngineCore", HeldCore)
    engine = AsyncEngine(EngineConfig(model="held")).start()
    engine.wait_until_ready()
    return engine


async def ask(engine, request_id):
    async for _ in engine.generate("a prompt", SamplingParams(), request_id):
        pass


def test_all_who_wait_hear_of_the_end(engine):
    """One is being served, one waits in the queue; one asks too late."""
    core = engine._core
    core.error = RuntimeError("the device is gone")

    async def run():
        served = asyncio.create_task(ask(engine, "served"))
        await asyncio.to_thread(core.is_stepping.wait, 10)
        queued = asyncio.create_task(ask(engine, "queued"))
        await asyncio.sleep(0.05)
        core.may_go_on.set()
        return await asyncio.wait_for(asyncio.gather(served, queued, return_exceptions=True), timeout=10)

    assert [type(outcome) for outcome in asyncio.run(run())] == [EngineDeadError] * 2
    assert not engine.is_healthy
    with pytest.raises(EngineDeadError, match="not running"):
        asyncio.run(asyncio.wait_for(ask(engine, "late"), timeout=10))
    engine.abort("served")
    engine.shutdown()


def test_shutdown_tells_those_it_leaves(engine):
    core = engine._core

    async def run():
        waiting = [asyncio.create_task(ask(engine, "served"))]
        await asyncio.to_thread(core.is_stepping.wait, 10)
        stopping = threading.Thread(target=engine.shutdown)
        stopping.start()
        while engine._commands.empty():
            time.sleep(0.001)
        waiting.append(asyncio.create_task(ask(engine, "behind the last command")))
        await asyncio.sleep(0.05)
        core.may_go_on.set()
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), timeout=10)

    assert [type(outcome) for outcome in asyncio.run(run())] == [EngineDeadError] * 2


def test_a_flood_of_requests_does_not_stop_those_who_run(engine):
    core, steps, went_on = engine._core, [], threading.Event()

    def step():
        steps.append(None)
        if len(steps) == 5:
            went_on.set()
        return []

    def one_more(core):
        if not went_on.is_set():
            engine._ask(one_more)

    core.step, core.has_work = step, True
    for _ in range(3):
        engine._ask(one_more)
    assert went_on.wait(10)
    engine.shutdown()
