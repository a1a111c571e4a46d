"""Device. T9: log-probabilities of accepted, corrected and bonus tokens are a teacher-forced reference's."""

import dataclasses

import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.errors import RequestError
from tests.lossless.engines import CHUNK_TOKENS, MAX_MODEL_LEN, VOCAB_SIZE, custom, make_engine
from tests.lossless.replay import Script, replay_proposer, set_scripts
from tests.oracle.edits import edited
from tests.oracle.llama import row_of
from tests.rejection.numpy_reference import kept_logits

K = 4
TOP = 5
PROMPTS = ([3, 9, 3, 9, 4], list(range(1, CHUNK_TOKENS + 4)), [7])  # the second is longer than a chunk
PENALTY = {"frequency_penalty": 0.7, "logit_bias": {4: 1.0}}


def log_softmax(x):
    with np.errstate(divide="ignore"):
        return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def check_entry(entry, token, wanted_V, num_top):
    """One token's dict against the distribution it is of."""
    assert next(iter(entry)) == token
    order = np.argsort(-wanted_V, kind="stable")[:num_top]
    assert set(entry) == {token, *order.tolist()}
    for other, one in entry.items():
        if np.isfinite(wanted_V[other]):
            assert one.logprob == pytest.approx(wanted_V[other], abs=1e-4)
            assert one.rank == 1 + (wanted_V > wanted_V[other]).sum()
        else:
            assert one.logprob == -np.inf
        assert one.decoded_token is None, "this model has no tokenizer"


@pytest.fixture(scope="module")
def engines(target):
    proposer = replay_proposer(K, MAX_MODEL_LEN)
    raw = make_engine(target, custom(K), proposer=proposer, rounds_per_batch=3)
    processed = make_engine(target, custom(K), proposer=proposer, logprobs_mode="processed_logprobs")
    return {"raw": (raw, proposer), "processed": (processed, proposer)}


def answers_with(engine, proposer, params):
    """Outputs for the prompts when drafts are right but for every third token; the first run teaches the drafts."""
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    set_scripts(engine, proposer, [])
    bare = dataclasses.replace(params, logprobs=None, prompt_logprobs=None)
    told = [output.outputs[0].token_ids for output in engine.generate(prompts, bare, use_tqdm=False)]
    scripts = []
    for prompt, answer in zip(PROMPTS, told, strict=True):
        ids = [*prompt, *answer]
        scripts.append(Script(ids, wrong={at: (ids[at] + 1) % VOCAB_SIZE for at in range(len(prompt), len(ids), 3)}))
    set_scripts(engine, proposer, scripts)
    num_compiled = engine.compiles_after_ready
    outputs = engine.generate(prompts, params, use_tqdm=False)
    assert engine.compiles_after_ready == num_compiled
    again = engine.generate(prompts, bare, use_tqdm=False)
    for output, bare_output, answer in zip(outputs, again, told, strict=True):
        assert output.outputs[0].token_ids == answer
        assert bare_output.outputs[0].logprobs is None
        figures = output.metrics.speculative_decoding
        assert figures == bare_output.metrics.speculative_decoding, "asking does not turn speculation off"
        assert sum(count > 0 for count in figures["acceptance_histogram"]) > 1
    return outputs


@pytest.mark.parametrize("draw", [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 3}])
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_are_a_teacher_forced_references(mode, draw, engines, target_oracle):
    params = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=TOP, prompt_logprobs=2, **draw, **PENALTY)
    for prompt, output in zip(PROMPTS, answers_with(*engines[mode], params), strict=True):
        (answer,) = output.outputs
        assert len(answer.logprobs) == len(answer.token_ids) == 16
        for at, (token, entry) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            done = answer.token_ids[:at]
            wanted_V = target_oracle.next_logits((*prompt, *done))
            if mode == "processed":
                wanted_V = edited(wanted_V, params, prompt, done)
                wanted_V = wanted_V if params.is_greedy else kept_logits(wanted_V, row_of(params))
            check_entry(entry, token, log_softmax(wanted_V), TOP)
        total = sum(entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True))
        assert answer.cumulative_logprob == pytest.approx(total)

        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for at in range(1, len(prompt)):
            wanted_V = log_softmax(target_oracle.next_logits(tuple(prompt[:at])))
            check_entry(output.prompt_logprobs[at], prompt[at], wanted_V, 2)


def test_logprobs_end_with_their_answer(engines, target_oracle):
    engine, proposer = engines["raw"]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
    answers = answers_with(engine, proposer, params)
    stop = answers[0].outputs[0].token_ids[6]
    first = answers[0].outputs[0].token_ids.index(stop)
    stopped = dataclasses.replace(params, stop_token_ids=[stop], n=2)
    (output,) = engine.generate({"prompt_token_ids": list(PROMPTS[0])}, stopped, use_tqdm=False)
    for one in output.outputs:
        assert one.finish_reason == "stop"
        assert len(one.logprobs) == len(one.token_ids) == first + 1
        assert [list(entry) for entry in one.logprobs] == [[token] for token in one.token_ids]
    assert output.prompt_logprobs is None


def test_all_of_a_vocabulary(target, target_oracle):
    engine = make_engine(target, max_logprobs=-1)
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=-1, prompt_logprobs=-1)
    (output,) = engine.generate({"prompt_token_ids": [3, 9]}, params, use_tqdm=False)
    assert [len(entry) for entry in output.outputs[0].logprobs] == [VOCAB_SIZE] * 3
    check_entry(output.prompt_logprobs[1], 9, log_softmax(target_oracle.next_logits((3,))), VOCAB_SIZE)


@pytest.mark.parametrize("wish", [{"logprobs": -1}, {"prompt_logprobs": 21}, {"logprobs": 32}])
def test_more_than_the_engine_keeps_is_refused(wish, engines):
    engine, _ = engines["raw"]
    with pytest.raises(RequestError, match="must not exceed the engine's max_logprobs=20"):
        engine.generate({"prompt_token_ids": [1]}, SamplingParams(**wish), use_tqdm=False)
