"""Device. T24: the smallest and the largest of everything, and what is refused."""

import re

import numpy as np
import pytest

from jaxspec import CapacityError, RequestError, SamplingParams
from tests.lossless.engines import MAX_MODEL_LEN, VOCAB_SIZE, draft_model, make_engine, ngram
from tests.oracle.llama import assert_says, continuation
from tests.quick import heavy_but

GREEDY = {"temperature": 0, "ignore_eos": True}


KINDS = ("K=1", "long window", "draft of one")


@pytest.fixture(scope="module", params=heavy_but(KINDS, lambda name: name == "draft of one"))
def engine(request, target, drafter):
    config = {
        "K=1": ngram(1, 1, 1),
        "long window": ngram(8, 5, 9),
        "draft of one": draft_model(1, drafter, "probabilistic"),
    }[request.param]
    return make_engine(target, config, num_pages=2 * MAX_MODEL_LEN // 4)


def check(engine, oracle, prompt, **params):
    (output,) = engine.generate({"prompt_token_ids": prompt}, SamplingParams(**(GREEDY | params)), use_tqdm=False)
    num_tokens = min(params.get("max_tokens") or MAX_MODEL_LEN, MAX_MODEL_LEN - len(prompt))
    assert_says(output.outputs[0].token_ids, continuation(oracle, prompt, num_tokens))
    assert output.outputs[0].finish_reason == "length"
    assert output.metrics.speculative_decoding["num_output_tokens"] == num_tokens


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9, 16, 17])
def test_short_prompts(engine, target_oracle, length):
    """Down to one token, and shorter than the window that is looked up."""
    check(engine, target_oracle, [7] * length, max_tokens=12)
    check(engine, target_oracle, list(range(length)), max_tokens=1)


@pytest.mark.parametrize("room", [1, 2, 3, 9])
def test_prompts_that_leave_almost_no_room(engine, target_oracle, room):
    prompt = np.tile([3, 1, 4, 1, 5, 9], 20)[: MAX_MODEL_LEN - room].tolist()
    check(engine, target_oracle, prompt, max_tokens=None)
    check(engine, target_oracle, prompt, max_tokens=room)
    check(engine, target_oracle, prompt, max_tokens=1)
    check(engine, target_oracle, prompt, max_tokens=room + 50)


def test_more_answers_than_rows(engine, target_oracle):
    params = SamplingParams(n=7, max_tokens=6, **GREEDY)
    (output,) = engine.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
    answer = continuation(target_oracle, [1, 2, 3], 6)
    assert [completion.index for completion in output.outputs] == list(range(7))
    for completion in output.outputs:
        assert_says(completion.token_ids, answer)


def test_many_requests_wait_for_rows_and_pages(engine, target_oracle):
    """Thirty at once, each for half of the pages there are."""
    prompts = [[index % VOCAB_SIZE, 2, index // 3] for index in range(30)]
    params = SamplingParams(max_tokens=MAX_MODEL_LEN - 3 if engine.config.num_speculative_tokens == 1 else 9, **GREEDY)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_says(output.outputs[0].token_ids, continuation(target_oracle, prompt, params.max_tokens))


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param", "says"),
    [
        ([], {}, RequestError, "prompt", "at least one token"),
        ([1] * MAX_MODEL_LEN, {}, RequestError, "prompt", f"{MAX_MODEL_LEN} tokens"),
        ([1, VOCAB_SIZE], {}, RequestError, "prompt", f"{VOCAB_SIZE} is outside the vocabulary"),
        ([1, -1], {}, RequestError, "prompt", "-1 is outside the vocabulary"),
        ([1, 2.0], {}, RequestError, "prompt", "integers, got 2.0"),
        ([True], {}, RequestError, "prompt", "integers, got True"),
        ([1], {"stop_token_ids": [VOCAB_SIZE]}, RequestError, "stop_token_ids", "outside the vocabulary"),
        ([1], {"stop_token_ids": list(range(20)) * 4}, None, None, None),
        ([1], {"stop": "x"}, RequestError, "stop", "needs a tokenizer"),
    ],
)
def test_refusals_name_the_field_and_start_nothing(engine, prompt, params, error, param, says):
    good = ({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=2, **GREEDY))
    asked = ({"prompt_token_ids": prompt}, SamplingParams(max_tokens=2, **(GREEDY | params)))
    both = [list(pair) for pair in zip(good, asked, strict=True)]
    if error is None:
        assert len(engine.generate(*both, use_tqdm=False)) == 2
        return
    with pytest.raises(error, match=re.escape(says)) as caught:
        engine.generate(*both, use_tqdm=False)
    assert caught.value.param == param
    assert not engine.core.has_work
    assert engine.core.scheduler.num_used == 0
    assert len(engine.generate(*good, use_tqdm=False)) == 1


def test_a_length_that_the_pages_cannot_hold_is_refused_at_the_start(target):
    with pytest.raises(CapacityError, match="max_model_len=64 needs more than the 32 tokens"):
        make_engine(target, None, num_pages=8, max_model_len=64)
    engine = make_engine(target, None, num_pages=8, max_model_len=32)
    params = SamplingParams(max_tokens=None, **GREEDY)
    (output,) = engine.generate({"prompt_token_ids": [1] * 24}, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8


@pytest.mark.parametrize(
    ("prompt", "says"),
    [("text", "no tokenizer"), (7, "a prompt is a string"), ({"prompt_ids": [1]}, "a prompt is a string")],
)
def test_prompts_of_another_form(engine, prompt, says):
    with pytest.raises(RequestError, match=says) as caught:
        engine.generate([prompt], SamplingParams(max_tokens=2), use_tqdm=False)
    assert caught.value.param == "prompt"


def test_no_prompts_no_answers(engine):
    assert engine.generate([], use_tqdm=False) == []
