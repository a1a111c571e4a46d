"""Device. After rounds in which nobody drafted, every proposer drafts what it would have drafted anyway."""

import functools

import jax
import numpy as np
import pytest

from jaxspec.proposers import draft_model
from jaxspec.sampling.edit_table import edit_row
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.table import table_row
from jaxspec.step import pack, rounds
from jaxspec.step.prefill import admit, prefill
from tests.contracts.members import (
    DRAFT,
    MAX_LEN,
    PAGE_SIZE,
    PROPOSERS,
    ROWS,
    V,
    make_proposer,
    make_state,
    make_target,
    make_weights,
    pages_of,
)
from tests.quick import heavy_but

PAGES_PER_ROW = MAX_LEN // PAGE_SIZE
PROMPTS = {1: [1, 2, 3, 1, 2], 0: [4, 4, 4]}
PLAIN_ROUNDS = 11  # more than a pass of any of these proposers takes in
CHUNK = 8
OFTEN = {"draft_model"}


def admission(row, token_ids):
    params = SamplingParams(temperature=float(row))
    return pack.pack_admission(
        row=row, token_ids=token_ids, num_prompt_tokens=len(token_ids), max_model_len=MAX_LEN, min_len=MAX_LEN,
        max_len=MAX_LEN, max_drafts=None, wants_logprobs=False, stop_ids=[],
        sampling=table_row(params, np.array([row, 7], np.uint32)),
        edits=edit_row(params, (), V),
    )  # fmt: skip


@functools.cache
def programs(proposer):
    return jax.jit(functools.partial(admit, proposer)), jax.jit(
        functools.partial(prefill, make_target(), proposer, CHUNK)
    )


def prefilled(proposer, weights, texts):
    """A state in which the rows hold these texts, through prefill alone."""
    state = make_state(proposer)
    bring_in, fill = programs(proposer)
    for row, token_ids in texts.items():
        state = bring_in(state, admission(row, token_ids))
        for start in range(0, len(token_ids) - 1, CHUNK):
            size = min(CHUNK, len(token_ids) - 1 - start)
            state, _ = fill(weights, state, pack.pack_chunk(row, start, size, pages_of(row), PAGES_PER_ROW))
    return state


def batch_of(max_drafts):
    rows = list(PROMPTS)
    return pack.pack_batch(rows, [pages_of(row) for row in rows], 2, ROWS, PAGES_PER_ROW, max_drafts)


def after_plain_rounds(proposer, weights):
    """(state, texts) when the rows have decoded plainly for a while."""
    state = prefilled(proposer, weights, PROMPTS)
    run = jax.jit(functools.partial(rounds.decode_rounds, make_target(), proposer, PLAIN_ROUNDS, widths=(0,)))
    state, output = run(weights, state, batch_of(0), np.int32(PLAIN_ROUNDS))
    packed_RBX = np.asarray(output.packed_BX)
    assert (packed_RBX[..., -2:] == 0).all(), "nobody drafts"
    tokens_BR = packed_RBX[:, :, 0].T.tolist()
    return state, {row: [*prompt, *tokens_BR[place]] for place, (row, prompt) in enumerate(PROMPTS.items())}


@pytest.mark.parametrize("name", heavy_but(PROPOSERS, OFTEN.__contains__))
def test_drafts_after_plain_rounds_are_those_of_a_drafter_that_saw_the_text(name):
    if name == "replay":
        pytest.skip("drafts from scripts")
    proposer, weights = make_proposer(name), make_weights()
    state, texts = after_plain_rounds(proposer, weights)
    propose = jax.jit(functools.partial(rounds.propose, proposer))
    drafts, _ = propose(weights, state, batch_of(pack.NO_LIMIT))
    wanted, _ = propose(weights, prefilled(proposer, weights, texts), batch_of(pack.NO_LIMIT))
    np.testing.assert_array_equal(drafts.counts_B, wanted.counts_B)
    np.testing.assert_array_equal(drafts.token_ids_BK, wanted.token_ids_BK)
    if not name.startswith("ngram") and name != "none":
        assert (np.asarray(drafts.counts_B) > 0).all()


def test_a_model_that_is_far_behind_takes_a_bounded_number_of_passes_a_round(monkeypatch):
    monkeypatch.setattr(draft_model, "MOST_PASSES", 2)
    proposer, weights = DRAFT(sample_method="greedy"), make_weights()
    state, texts = after_plain_rounds(proposer, weights)
    propose = jax.jit(functools.partial(rounds.propose, proposer))
    counts, cached = [], []
    for _ in range(2):
        drafts, state = propose(weights, state, batch_of(pack.NO_LIMIT))
        counts.append(np.asarray(drafts.counts_B).tolist())
        cached.append(np.asarray(state.proposer.cached_R)[list(PROMPTS)].tolist())
    passed = 2 * (proposer.num_tokens + 1)
    assert counts == [[0, 0], [proposer.num_tokens] * 2]
    assert cached == [[len(prompt) - 1 + passed for prompt in PROMPTS.values()], list(map(len, texts.values()))]
    wanted, _ = propose(weights, prefilled(proposer, weights, texts), batch_of(pack.NO_LIMIT))
    np.testing.assert_array_equal(drafts.token_ids_BK, wanted.token_ids_BK)
