"""Host. `AsyncEngine`: streams on any event loop, aborts that free what they held, and ends that everyone hears of."""

import asyncio
import threading
import time

import pytest

from jaxspec import AsyncEngine, EngineConfig, RequestError, SamplingParams
from jaxspec.engine import build
from jaxspec.errors import JaxspecError
from tests.lossless import engines
from tests.lossless.engines import ngram
from tests.oracle.llama import assert_says, continuation

K = 3
GREEDY = SamplingParams(temperature=0, max_tokens=14)
LONG = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
PROMPT = {"prompt_token_ids": [1, 2, 3, 1, 2]}
WAIT_S = 30


def start(folder):
    config = EngineConfig(
        model=str(folder),
        speculative_config=ngram(K),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        block_size=4,
        compilation_cache_dir=None,
        gpu_memory_utilization=0.2,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_buckets", engines.full_sizes_alone)
        engine = AsyncEngine(config)
        assert not engine.is_ready
        engine.start().wait_until_ready()
    assert engine.is_ready
    assert engine.is_healthy
    return engine


@pytest.fixture(scope="module")
def engine(spoken):
    engine = start(spoken)
    yield engine
    engine.shutdown()
    assert not engine.is_healthy


def slow_down(engine, monkeypatch):
    """A pace at which one can act in the middle of an answer, however busy the machine is."""
    step = engine._core.step

    def slow_step():
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(engine._core, "step", slow_step)
    return engine


@pytest.fixture
def slow(engine, monkeypatch):
    return slow_down(engine, monkeypatch)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_S))


async def collect(engine, prompt, params, request_id):
    return [output async for output in engine.generate(prompt, params, request_id)]


def num_used(engine) -> int:
    return engine._core.scheduler.num_used


def num_aborted(engine) -> int:
    return engine.metrics.snapshot()["vllm:request_success"].get("abort", 0)


def wait_until(is_true):
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_deltas_join_to_the_whole(engine, oracle):
    outputs = run(collect(engine, PROMPT, GREEDY, "a"))
    answer = continuation(oracle, PROMPT["prompt_token_ids"], 14)
    assert_says(outputs[-1].outputs[0].token_ids, answer)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    ids, text = [], ""
    for output in outputs:
        ids += output.outputs[0].token_ids_delta
        text += output.outputs[0].text_delta
        assert (output.outputs[0].token_ids, output.outputs[0].text) == (ids, text)
    assert len(outputs) > 2


def test_many_at_once_are_answered_as_one_alone(engine, oracle):
    prompts = [[index, 2, index] for index in range(8)]

    async def all_of_them():
        return await asyncio.gather(
            *(collect(engine, {"prompt_token_ids": ids}, GREEDY, f"many-{ids[0]}") for ids in prompts)
        )

    for ids, outputs in zip(prompts, run(all_of_them()), strict=True):
        assert_says(outputs[-1].outputs[0].token_ids, continuation(oracle, ids, 14))


def test_leaving_frees_the_pages_while_others_go_on(slow, oracle):
    async def leave_after(count, name):
        stream = slow.generate(PROMPT, LONG, name)
        for _ in range(count):
            await anext(stream)
        await stream.aclose()

    async def both():
        stays = asyncio.create_task(collect(slow, PROMPT, LONG, "stays"))
        await leave_after(1, "leaves-1")
        await leave_after(2, "leaves-2")
        return await stays

    before = num_aborted(slow)
    outputs = run(both())
    assert_says(outputs[-1].outputs[0].token_ids, continuation(oracle, PROMPT["prompt_token_ids"], 50))
    wait_until(lambda: num_used(slow) == 0)
    run(leave_after(1, "leaves-1"))  # its id is free again
    wait_until(lambda: num_used(slow) == 0 and not slow._core.has_work)
    assert num_aborted(slow) - before == 3  # ended where they stood, not run to their end
    assert not slow._clients


def test_a_cancelled_task_aborts(slow):
    async def cancelled():
        task = asyncio.create_task(collect(slow, PROMPT, LONG, "cancelled"))
        wait = asyncio.get_running_loop().run_in_executor(None, wait_until, lambda: num_used(slow) > 0)
        await wait
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = num_aborted(slow)
    run(cancelled())
    wait_until(lambda: num_used(slow) == 0 and not slow._clients)
    assert num_aborted(slow) - before == 1


def test_abort_by_name_ends_the_stream_with_what_there_is(slow, oracle):
    async def aborted():
        outputs = []
        async for output in slow.generate(PROMPT, LONG, "named"):
            outputs.append(output)
            slow.abort("named")
        return outputs

    last = run(aborted())[-1]
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    kept = last.outputs[0].token_ids
    assert kept == continuation(oracle, PROMPT["prompt_token_ids"], 50).token_ids[: len(kept)]
    assert len(kept) < 50
    slow.abort("nobody")


def test_a_refusal_reaches_its_asker_alone(engine):
    async def asked():
        good = asyncio.create_task(collect(engine, PROMPT, GREEDY, "good"))
        for prompt, params in (({"prompt_token_ids": []}, GREEDY), ({"prompt_token_ids": [99]}, GREEDY), (3, GREEDY)):
            with pytest.raises(RequestError) as caught:
                await collect(engine, prompt, params, "bad")
            assert caught.value.param == "prompt"
        return await good

    assert run(asked())[-1].finished
    assert engine.is_healthy


def test_an_id_in_use_is_refused_and_its_owner_keeps_its_stream(slow):
    async def twice():
        first = slow.generate(PROMPT, LONG, "same")
        await anext(first)
        with pytest.raises(RequestError, match="in use"):
            await collect(slow, PROMPT, GREEDY, "same")
        return [output async for output in first]

    assert run(twice())[-1].outputs[0].finish_reason == "length"


def test_two_event_loops_in_two_threads(engine, oracle):
    answers = {}

    def in_thread(name):
        answers[name] = run(collect(engine, PROMPT, GREEDY, name))[-1].outputs[0].token_ids

    threads = [threading.Thread(target=in_thread, args=(f"loop-{index}",)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(answers) == 2
    for ids in answers.values():
        assert_says(ids, continuation(oracle, PROMPT["prompt_token_ids"], 14))


def test_a_loop_that_closes_under_its_request_harms_nobody(slow):
    loop = asyncio.new_event_loop()
    stream = slow.generate(PROMPT, LONG, "orphan")
    loop.run_until_complete(anext(stream))
    loop.close()
    assert run(collect(slow, PROMPT, GREEDY, "after the orphan"))[-1].finished
    slow.abort("orphan")
    wait_until(lambda: not slow._core.has_work)
    assert slow.is_healthy


def test_what_it_shows(engine):
    assert engine.config.num_speculative_tokens == K
    assert engine.tokenizer.vocab_size == 32
    assert engine.metrics.snapshot()["vllm:generation_tokens"] > 0


def test_shutdown_ends_open_requests_with_an_error(spoken, monkeypatch):
    engine = slow_down(start(spoken), monkeypatch)

    async def open_at_the_end():
        stream = engine.generate(PROMPT, LONG, "open")
        await anext(stream)
        await asyncio.get_running_loop().run_in_executor(None, engine.shutdown)
        with pytest.raises(JaxspecError, match="stopped"):
            async for _ in stream:
                pass
        with pytest.raises(JaxspecError, match="not running"):
            await collect(engine, PROMPT, GREEDY, "too late")

    run(open_at_the_end())
    assert not engine.is_healthy
    engine.shutdown()  # a second time is harmless


def test_a_failure_of_the_thread_reaches_every_client(spoken, monkeypatch):
    engine = slow_down(start(spoken), monkeypatch)

    def fail():
        raise RuntimeError("device lost")

    async def clients():
        streams = [engine.generate(PROMPT, LONG, f"client-{index}") for index in range(3)]
        for stream in streams:
            await anext(stream)
        monkeypatch.setattr(engine._core, "step", fail)
        for stream in streams:
            with pytest.raises(JaxspecError, match="stopped"):
                async for _ in stream:
                    pass
        with pytest.raises(JaxspecError, match="not running"):
            await collect(engine, PROMPT, GREEDY, "too late")

    run(clients())
    assert not engine.is_healthy
    engine.shutdown()


def test_who_asks_while_the_thread_dies_is_told(spoken, monkeypatch):
    """Commands that were queued and never taken: their askers must not wait for ever."""
    engine = slow_down(start(spoken), monkeypatch)
    failing = threading.Event()

    def fail():
        failing.wait(WAIT_S)
        raise RuntimeError("device lost")

    async def clients():
        stream = engine.generate(PROMPT, LONG, "first")
        await anext(stream)
        monkeypatch.setattr(engine._core, "step", fail)
        waiting = [asyncio.create_task(collect(engine, PROMPT, GREEDY, f"queued-{index}")) for index in range(5)]
        await asyncio.sleep(0.2)
        failing.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, JaxspecError) for result in results)
        with pytest.raises(JaxspecError):
            async for _ in stream:
                pass

    run(clients())


def test_an_engine_that_cannot_be_built_says_why(tmp_path):
    engine = AsyncEngine(EngineConfig(model=str(tmp_path / "nothing")))
    engine.start()
    with pytest.raises(JaxspecError, match="nothing"):
        engine.wait_until_ready()
    assert not engine.is_ready
    assert not engine.is_healthy
    with pytest.raises(JaxspecError, match="not running"):
        run(collect(engine, PROMPT, GREEDY, "a"))
    with pytest.raises(JaxspecError, match="not ready"):
        engine.config  # noqa: B018
