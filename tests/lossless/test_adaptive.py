"""Device. `num_speculative_tokens: auto`: plain decoding's text, rounds of every width, and nothing compiled for it."""

import dataclasses

import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.engine.core import EngineCore
from jaxspec.step.compiles import compile_count
from jaxspec.step.costs import RoundCosts
from tests.lossless.engines import VOCAB_SIZE, draft_model, make_engine, ngram
from tests.oracle.folders import write_llama
from tests.oracle.llama import NumpyLlama, assert_says, continuation

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5] * 9, [7, 8, 9]]
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("auto") / "model", seed=4, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def engine(folder):
    return make_engine(folder, ngram("auto"), rounds_per_batch=2)


def answers(engine, seconds):
    """(texts, their acceptance) where rounds of its widths seem to cost this."""
    core = engine.core
    rows = core.parts.programs.shapes.batch_rows
    made_up = RoundCosts((1,), core.parts.costs.drafts, {row: np.array([seconds]) for row in rows})
    borrower = EngineCore(dataclasses.replace(core.parts, costs=made_up, state=core.state))
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    requests = [borrower.add_request(str(n), {"prompt_token_ids": ids}, params) for n, ids in enumerate(PROMPTS)]
    while borrower.has_work:
        borrower.step()
    core.state = borrower.state
    sequences = [request.sequences[0] for request in requests]
    return [sequence.progress.token_ids for sequence in sequences], [sequence.stats for sequence in sequences]


@pytest.mark.heavy
def test_rounds_were_timed(engine):
    costs = engine.core.parts.costs
    assert costs.drafts == (0, 2, 8)
    for seconds in costs.seconds.values():
        assert (seconds > 0).all()
        assert (np.diff(seconds, axis=1) >= 0).all()


def test_text_is_plain_decoding_s_whatever_drafts_seem_to_cost(engine, folder):
    oracle = NumpyLlama(folder)
    wanted = [continuation(oracle, ids, TOKENS) for ids in PROMPTS]
    compiled = compile_count()
    drafted = []
    for seconds in ([1, 1, 1], [1, 1.01, 9e9], [1, 8e9, 9e9]):
        texts, stats = answers(engine, seconds)
        for text, answer in zip(texts, wanted, strict=True):
            assert_says(text, answer)
        drafted.append(max(one.num_draft_tokens / max(one.num_drafts, 1) for one in stats))
    assert drafted[0] > 2 >= drafted[1] > 0 == drafted[2]
    assert compile_count() == compiled


@pytest.mark.heavy
@pytest.mark.parametrize("sample_method", ["greedy", "probabilistic"])
def test_a_draft_model_resumes_after_fifty_plain_tokens_as_if_it_had_never_paused(folder, sample_method):
    """The target drafts for itself: whatever it guesses is right, if it has seen all of the text."""
    engine = make_engine(folder, draft_model("auto", folder, sample_method), max_model_len=128)
    core = engine.core
    rows = core.parts.programs.shapes.batch_rows
    assert core.parts.costs.drafts == (0, 1, 2, 3, 8)
    off, on = np.array([[1, 9e9, 9e9, 9e9, 9e9]]), np.array([[1, 1.01, 1.02, 1.03, 1.04]])
    seconds = dict.fromkeys(rows, off)
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    costs = RoundCosts((1,), core.parts.costs.drafts, seconds)
    core = EngineCore(dataclasses.replace(core.parts, costs=costs, state=core.state))
    sequence = core.add_request("a", {"prompt_token_ids": PROMPTS[0]}, params).sequences[0]
    while len(sequence.progress.token_ids) < 50:
        core.step()
    assert sequence.stats.num_drafts == 0
    seconds.update(dict.fromkeys(rows, on))
    core.step()
    assert sequence.stats.histogram == [0] * 8 + [1], "it drafts at once, and all is kept"
    while core.has_work:
        core.step()
    assert_says(sequence.progress.token_ids, continuation(NumpyLlama(folder), PROMPTS[0], 90))
    assert sum(sequence.stats.histogram[:8]) <= 1, "but for the cut at the end"
