"""Device. A program fails after its state was given away: every row begins again, and no answer differs by a token."""

import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.engine.core import MAX_FAILURES
from tests.lossless.engines import draft_model, make_engine
from tests.oracle.llama import assert_says, continuation, row_of

K = 3
REQUESTS = [
    ([1, 2, 3, 1, 2, 3, 1], {"temperature": 0.0, "logprobs": 1}),
    ([9], {"temperature": 0.0, "prompt_logprobs": 1}),
    ([7, 8] * 11, {"temperature": 1.0, "seed": 4, "prompt_logprobs": 1}),
    ([8, 8, 9, 8], {"temperature": 0.0, "stop": ["zzz"], "min_tokens": 9}),
]
PARAMS = [SamplingParams(**({"max_tokens": 14, "ignore_eos": True} | params)) for _, params in REQUESTS]
PROMPTS = [{"prompt_token_ids": ids} for ids, _ in REQUESTS]


@pytest.fixture(scope="module")
def engine(spoken, drafter):
    return make_engine(spoken, draft_model(K, drafter), max_model_len=48)


class Broken:
    """What a program gives when it failed on the device: nobody knows before its results are asked for."""

    def __array__(self, *args, **kwargs):
        raise RuntimeError("the device failed")


def failing(engine, monkeypatch, name, should_fail, how):
    """Make a program fail whenever should_fail(number of the call) says so."""
    programs, calls = engine.core._programs, []
    run = getattr(programs, name)

    def broken(*args):
        calls.append(name)
        if not should_fail(len(calls)):
            return run(*args)
        if how == "at once":
            run(*args)  # the state is donated, and gone
            raise RuntimeError("the device failed")
        state, output = run(*args)
        return state, output.replace(packed_BX=Broken())

    monkeypatch.setattr(programs, name, broken)
    return calls


@pytest.mark.parametrize(
    ("name", "how"),
    [("decode_rounds", "at once"), ("decode_rounds", "later"), ("prefill", "at once"), ("admit", "at once")],
)
def test_no_token_is_lost_or_said_twice(engine, oracle, monkeypatch, name, how):
    wanted = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    for output, (ids, _), params in zip(wanted, REQUESTS, PARAMS, strict=True):
        assert_says(output.outputs[0].token_ids, continuation(oracle, ids, 14, row_of(params)))
    before = engine.core.metrics.snapshot()["vllm:num_preemptions"]
    calls = failing(engine, monkeypatch, name, lambda number: number in (2, 4, 9), how)
    outputs = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert len(calls) > 4
    assert engine.core.metrics.snapshot()["vllm:num_preemptions"] > before
    for output, other in zip(outputs, wanted, strict=True):
        answer, same = output.outputs[0], other.outputs[0]
        assert (answer.token_ids, answer.text, answer.finish_reason) == (same.token_ids, same.text, same.finish_reason)
        figures = (one.metrics.speculative_decoding["acceptance_histogram"] for one in (output, other))
        assert next(figures) == next(figures)
        if same.logprobs is not None:
            says = [[{t: (p.rank, p.decoded_token) for t, p in e.items()} for e in a.logprobs] for a in (answer, same)]
            assert says[0] == says[1]
            np.testing.assert_allclose(answer.cumulative_logprob, same.cumulative_logprob, atol=1e-4)
        if other.prompt_logprobs is not None:
            assert len(output.prompt_logprobs) == len(other.prompt_logprobs) == len(other.prompt_token_ids)
            assert [e and list(e) for e in output.prompt_logprobs] == [e and list(e) for e in other.prompt_logprobs]
    engine.core.scheduler.audit()
    assert engine.core.scheduler.num_used == 0


def test_what_never_gets_better_ends_loudly(engine, monkeypatch):
    with monkeypatch.context() as patch:
        calls = failing(engine, patch, "decode_rounds", lambda number: True, "later")
        with pytest.raises(RuntimeError, match="the device failed"):
            engine.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert len(calls) == MAX_FAILURES + 1
    assert not engine.core.has_work
    # Whoever goes on all the same finds an engine that works.
    (output,) = engine.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 14


def test_failures_with_tokens_between_them_may_go_on(engine, monkeypatch):
    failing(engine, monkeypatch, "decode_rounds", lambda number: number % 2 == 1, "at once")
    (output,) = engine.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 14
