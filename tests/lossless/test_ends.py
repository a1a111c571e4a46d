"""Device. T4 and T5: an answer ends at the same token as without speculation, wherever in a block that token lies."""

import numpy as np
import pytest

from jaxspec import SamplingParams
from tests.lossless.engines import MAX_MODEL_LEN, VOCAB_SIZE, custom, make_engine
from tests.lossless.replay import HostReplay, Script, replay_proposer, set_scripts
from tests.oracle.folders import write_llama
from tests.oracle.llama import NumpyLlama, assert_says, continuation
from tests.quick import heavy_but

K = 4
EOS = 17
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("eos") / "model", seed=4, vocab_size=VOCAB_SIZE, eos_token_id=[30, EOS])


@pytest.fixture(scope="module")
def cases(folder):
    """(prompt, its plain answer, where EOS first comes) of six prompts, found by trying."""
    oracle, rng, found = NumpyLlama(folder), np.random.default_rng(0), []
    while len(found) < 6:
        prompt = rng.integers(0, VOCAB_SIZE, rng.integers(1, 20)).tolist()
        answer = continuation(oracle, prompt, NUM_TOKENS)
        ends = [at for at, token_id in enumerate(answer.token_ids) if token_id in (30, EOS)]
        if ends and K + 1 < ends[0] < NUM_TOKENS - 4 and min(answer.leads) > 1e-3:
            found.append((prompt, answer, ends[0]))
    return found


PLACES = ("device", "host", "device, four rounds")


@pytest.fixture(scope="module", params=heavy_but(PLACES, lambda name: name == "device, four rounds"))
def replay(request, folder):
    proposer = HostReplay(K) if request.param == "host" else replay_proposer(K, MAX_MODEL_LEN)
    rounds = 4 if "four" in request.param else 1
    return make_engine(folder, custom(K), proposer=proposer, rounds_per_batch=rounds), proposer


def run(replay, cases, offset, *, wrong=None, **params):
    """Every case with the round of interest beginning `offset` tokens before its end; single tokens until there."""
    engine, proposer = replay
    scripts = []
    for prompt, answer, end in cases:
        anchor = len(prompt) + end - offset
        num_drafts = dict.fromkeys(range(len(prompt), anchor), 0)
        scripts.append(
            Script(prompt + answer.token_ids, wrong=(wrong or (lambda *_: {}))(prompt, end), num_drafts=num_drafts)
        )
    set_scripts(engine, proposer, scripts)
    params = SamplingParams(temperature=0, **({"max_tokens": NUM_TOKENS} | params))
    prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in cases]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    assert engine.core.scheduler.num_used == 0
    return [output.outputs[0] for output in outputs]


@pytest.mark.parametrize("offset", range(K + 1))
def test_eos_at_each_offset_of_a_block(replay, cases, offset):
    for completion, (_, answer, end) in zip(run(replay, cases, offset), cases, strict=True):
        assert_says(completion.token_ids, answer.cut(end + 1))
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


@pytest.mark.parametrize("offset", [0, 2, K])
def test_eos_ignored(replay, cases, offset):
    for completion, (_, answer, _) in zip(run(replay, cases, offset, ignore_eos=True), cases, strict=True):
        assert_says(completion.token_ids, answer)
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("offset", [0, 2, K])
def test_a_stop_id_is_named(replay, cases, offset):
    stops = {"ignore_eos": True, "stop_token_ids": [5, 30, EOS]}
    for completion, (_, answer, _) in zip(run(replay, cases, offset, **stops), cases, strict=True):
        first = next(at for at, token_id in enumerate(answer.token_ids) if token_id in (5, 30, EOS))
        assert_says(completion.token_ids, answer.cut(first + 1))
        assert (completion.finish_reason, completion.stop_reason) == ("stop", answer.token_ids[first])


@pytest.mark.parametrize("offset", [1, 2, K - 1])
def test_an_eos_that_is_drafted_but_rejected_changes_nothing(replay, cases, offset):
    """EOS guessed one token too early: rejected there, and found again where it belongs."""
    early = lambda prompt, end: {len(prompt) + end - 1: EOS}  # noqa: E731
    for completion, (_, answer, end) in zip(run(replay, cases, offset, wrong=early), cases, strict=True):
        assert_says(completion.token_ids, answer.cut(end + 1))
        assert completion.finish_reason == "stop"


@pytest.mark.parametrize("past", range(-1, K + 1))
def test_a_cap_anywhere_around_the_end(replay, cases, past):
    """max_tokens from one before EOS on, in a block that holds both: a stop inside the budget wins."""
    for case in cases:
        _, answer, end = case
        (completion,) = run(replay, [case], 2, max_tokens=end + 1 + past)
        kept = min(end + 1, end + 1 + past)
        assert_says(completion.token_ids, answer.cut(kept))
        assert completion.finish_reason == ("length" if past < 0 else "stop")


@pytest.mark.parametrize("cap", range(1, K + 3))
def test_a_cap_at_each_offset_of_the_first_block(replay, cases, cap):
    for completion, (_, answer, _) in zip(run(replay, cases, NUM_TOKENS, max_tokens=cap), cases, strict=True):
        assert_says(completion.token_ids, answer.cut(cap))
        assert completion.finish_reason == "length"


def masked_continuation(oracle, prompt, num_tokens, min_tokens, stops):
    """The naive loop with no stop id before min_tokens, ended by one."""
    ids = list(prompt)
    while len(ids) - len(prompt) < num_tokens:
        logits_V = oracle.next_logits(tuple(ids)).copy()
        if len(ids) - len(prompt) < min_tokens:
            logits_V[list(stops)] = -np.inf
        ids.append(int(logits_V.argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


def test_min_tokens_keeps_stop_ids_out_of_every_position_of_a_block(replay, folder, cases):
    oracle = NumpyLlama(folder)
    for beyond in (-1, 0, 1, 3):  # with -1 the minimum is reached just before the stop, which then counts
        answers = []
        for prompt, _, end in cases:
            answers.append(masked_continuation(oracle, prompt, NUM_TOKENS, end + 1 + beyond, {30, EOS}))
        # Drafts are the masked answer itself, so that positions on both sides of the minimum share a block.
        engine, proposer = replay
        set_scripts(
            engine, proposer, [Script(prompt + answer) for (prompt, _, _), answer in zip(cases, answers, strict=True)]
        )
        params = [
            SamplingParams(temperature=0, max_tokens=NUM_TOKENS, min_tokens=end + 1 + beyond) for _, _, end in cases
        ]
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt, _, _ in cases], params, use_tqdm=False)
        for output, answer, (_, plain, end) in zip(outputs, answers, cases, strict=True):
            assert (answer[: end + 1] == plain.token_ids[: end + 1]) == (beyond < 0)
            assert output.outputs[0].token_ids == answer
            assert output.metrics.speculative_decoding["num_accepted_draft_tokens"] > 0
