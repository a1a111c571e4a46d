"""Device. `num_speculative_tokens: auto`: plain decoding's text, rounds of every width, and nothing compiled for it."""

import dataclasses

import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.engine.core import EngineCore
from jaxspec.step.compiles import compile_count
from jaxspec.step.costs import RoundCosts
from tests.lossless.engines import VOCAB_SIZE, make_engine, ngram
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
