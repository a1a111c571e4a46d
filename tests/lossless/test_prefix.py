"""Device. What a request finds in the cache: with `exact` the very bits, with a salt its own, and never what must be
computed; by the engine's own front door."""

import pytest

from jaxspec import RequestError, SamplingParams
from tests.lossless.engines import draft_model, make_engine
from tests.oracle.llama import assert_says, continuation

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def exact(target, drafter):
    return make_engine(target, draft_model(3, drafter), exact=True)


def ask(engine, prompt, params=GREEDY):
    return engine.generate(prompt, params, use_tqdm=False)[0]


def test_an_exact_engine_says_the_same_to_the_last_bit(exact, target_oracle):
    """Cold, from shared pages, behind an answer and beside others."""
    first = ask(exact, {"prompt_token_ids": PROMPT})
    assert_says(first.outputs[0].token_ids, continuation(target_oracle, PROMPT, 16))
    assert first.num_cached_tokens == 0
    again = ask(exact, {"prompt_token_ids": PROMPT})
    assert again.num_cached_tokens == 16
    assert again.outputs[0].logprobs == first.outputs[0].logprobs
    many = exact.generate([{"prompt_token_ids": PROMPT + [k] * k} for k in range(4)], GREEDY, use_tqdm=False)
    assert many[0].outputs[0].logprobs == first.outputs[0].logprobs
    longer = PROMPT + first.outputs[0].token_ids
    cold = ask(exact, {"prompt_token_ids": longer, "cache_salt": "cold"})
    warm = ask(exact, {"prompt_token_ids": longer})
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 16)  # what decode rounds wrote is not shared
    assert warm.outputs[0].logprobs == cold.outputs[0].logprobs


def test_salts_and_prompt_logprobs(exact):
    prompt = [9, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    whole = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    asked = [({"cache_salt": salt}, params) for salt in ("a", "b", "a") for params in (whole, GREEDY)]
    outputs = [ask(exact, {"prompt_token_ids": prompt} | salt, params) for salt, params in asked]
    assert [output.num_cached_tokens for output in outputs] == [0, 8, 0, 8, 0, 8]
    for output in outputs[::2]:
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs == outputs[0].prompt_logprobs
    figures = exact.get_metrics()
    assert 0 < figures["vllm:prefix_cache_hits"] < figures["vllm:prefix_cache_queries"]


def test_what_is_none_is_refused(exact):
    for salt in ("", 3):
        with pytest.raises(RequestError, match="cache_salt"):
            ask(exact, {"prompt_token_ids": PROMPT, "cache_salt": salt})
    with pytest.raises(RequestError, match="scheduling_policy"):
        exact.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False, priority=1)
    assert not exact.core.has_work
