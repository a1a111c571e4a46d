"""Device. Lookup before another proposer: who drafts which row, from what distribution; and how long drafting takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.proposers.base import Proposer, RowView
from jaxspec.proposers.drawing import draft_in_steps, room_for
from jaxspec.proposers.lookup_first import lookup_first
from jaxspec.sampling.table import neutral_table
from jaxspec.types import Drafts

V, K, MAX_LEN = 9, 3, 12
# Rows: found ("1 2" came before), nothing to find, found but not active.
HISTORY = np.array([[1, 2, 5, 6, 1, 2], [1, 2, 3, 4, 5, 6], [7, 7, 7, 7, 7, 7]])


def inner(has_logits):
    """Drafts 8 wherever a row has room, and keeps the room it saw."""

    def propose(weights, state, view):
        del weights, state
        room_B = jnp.where(view.is_active_B, room_for(view, MAX_LEN, K), 0)
        ids_BK = jnp.where(jnp.arange(K)[None] < room_B[:, None], 8, -1)
        logits_BKV = jnp.full((3, K, V), 0.25) if has_logits else None
        return Drafts(token_ids_BK=ids_BK, counts_B=room_B, logits_BKV=logits_BKV), room_B

    return Proposer(K, lambda num_rows: (), lambda weights, state, *_: state, propose)


def view(max_len):
    history_BC = np.full((3, MAX_LEN), 2**31 - 1, np.int32)
    history_BC[:, : HISTORY.shape[1]] = HISTORY
    return RowView(
        rows_B=jnp.arange(3),
        is_active_B=jnp.asarray([True, True, False]),
        history_BC=jnp.asarray(history_BC),
        len_B=jnp.full(3, HISTORY.shape[1], jnp.int32),
        max_len_B=jnp.asarray(max_len, jnp.int32),
        pages_BM=jnp.zeros((3, 1), jnp.int32),
        table=neutral_table(3),
    )


@pytest.mark.parametrize("has_logits", [False, True])
def test_the_inner_proposer_has_room_only_where_nothing_was_found(has_logits):
    proposer = lookup_first(inner(has_logits), min_n=2, max_n=2, max_model_len=MAX_LEN)
    drafts, room_B = jax.jit(proposer.propose)({}, jnp.zeros(3, jnp.int32), view([MAX_LEN, 9, MAX_LEN]))
    assert room_B.tolist() == [0, 2, 0]
    assert drafts.counts_B.tolist() == [3, 2, 0]
    assert drafts.token_ids_BK.tolist() == [[5, 6, 1], [8, 8, -1], [-1, -1, -1]]
    if not has_logits:
        assert drafts.logits_BKV is None
        return
    prob_BKV = np.asarray(jax.nn.softmax(drafts.logits_BKV, axis=-1))
    np.testing.assert_array_equal(prob_BKV[0], np.eye(V)[[5, 6, 1]])
    np.testing.assert_array_equal(np.asarray(drafts.logits_BKV)[1:], np.full((2, K, V), 0.25))


def test_past_the_ends_of_tokens_the_distribution_is_one():
    """One token to copy, then none."""
    short = dataclasses.replace(view([MAX_LEN] * 3), history_BC=view([0] * 3).history_BC.at[0, :6].set(7))
    proposer = lookup_first(inner(True), min_n=5, max_n=5, max_model_len=MAX_LEN)
    drafts, _ = proposer.propose({}, (), short)
    assert drafts.token_ids_BK[0].tolist() == [7, -1, -1]
    np.testing.assert_allclose(jax.nn.softmax(drafts.logits_BKV, axis=-1)[0, 1:], 1 / V, rtol=1e-6)


@pytest.mark.parametrize(
    ("counts", "from_first", "num_steps"),
    [([1, 0], True, 0), ([0, 0], True, 0), ([1, 3], True, 2), ([0, 0], False, 0), ([2, 0], False, 2)],
)
def test_drafting_ends_with_the_row_that_drafts_most(counts, from_first, num_steps):
    """Each step drafts one more than the token before it."""

    def step(num_steps, token_B, offset):
        del offset
        return num_steps + 1, token_B + 1, None

    drafts, found = jax.jit(
        lambda counts_B: draft_in_steps(
            step, jnp.int32(0), jnp.asarray([4, 6], jnp.int32), counts_B, K,
            drawn_vocab_size=None if from_first else 0,
        )
    )(jnp.asarray(counts, jnp.int32))  # fmt: skip
    assert int(found) == num_steps
    starts = (4, 6) if from_first else (5, 7)
    wanted = [[start + k if k < count else -1 for k in range(K)] for start, count in zip(starts, counts, strict=True)]
    assert drafts.token_ids_BK.tolist() == wanted
