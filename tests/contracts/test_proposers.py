"""Device. What every proposer owes: well-formed guesses, from its row's committed tokens alone, and its state back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.pages import slots_of
from jaxspec.models.base import Tokens
from jaxspec.proposers.base import RowView
from jaxspec.proposers.ngram import ngram
from jaxspec.sampling.table import neutral_table
from tests.contracts.members import (
    DRAFT,
    HEADS,
    MAX_LEN,
    MOST,
    NUM_PAGES,
    PAGE_SIZE,
    PROPOSERS,
    ROWS,
    K,
    V,
    check_step,
    head_proposer,
    make_proposer,
    make_state,
    make_weights,
    own_layers,
    pages_of,
    stand_alone,
)
from tests.lossless.replay import ReplayTable, Script, make_table
from tests.quick import heavy_but

HISTORY = np.array([[1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 5, 5] * 2, [7] * 24, [3, 9] * 12])


OFTEN = {"none", "ngram", "draft_model", "probabilistic", "self", "ngram+eagle3, probabilistic"}
OFTEN |= {"eagle3", "mtp of three", "dspark"}


@pytest.fixture(scope="module", params=heavy_but(PROPOSERS, OFTEN.__contains__))
def proposer(request):
    return stand_alone(make_proposer(request.param))


@pytest.fixture(scope="module")
def state(proposer):
    state = make_state(proposer).proposer
    if isinstance(state, ReplayTable):
        state = make_table([Script(history.tolist()) for history in HISTORY], MAX_LEN)
    return state


def tokens_of(row, start, end):
    """One row's prompt [start, end), padded to the longest there is."""
    t_1T = np.arange(MAX_LEN, dtype=np.int32)[None]
    positions_1T = np.where(t_1T < end - start, start + t_1T, -1)
    pages_1M = np.array([pages_of(row)], np.int32)
    return Tokens(
        token_ids_BT=jnp.asarray(HISTORY[row][np.maximum(positions_1T, 0)], jnp.int32),
        positions_BT=jnp.asarray(positions_1T),
        slots_BT=slots_of(jnp.asarray(positions_1T), jnp.asarray(pages_1M), PAGE_SIZE),
        pages_BM=jnp.asarray(pages_1M),
    )


def view_of(rows, lengths, *, active=None, garbage=0, max_len=MAX_LEN):
    """The rows' view, with `garbage` behind their committed tokens."""
    history = np.where(np.arange(MAX_LEN) < np.array(lengths)[:, None], HISTORY[rows], garbage)
    B = len(rows)
    table = dataclasses.replace(
        neutral_table(B),
        temperature_B=jnp.asarray([float(row == 1) for row in rows], jnp.float32),
        key_B2=jnp.asarray([[row, 3] for row in rows], jnp.uint32),
    )
    return RowView(
        rows_B=jnp.asarray(rows, jnp.int32),
        is_active_B=jnp.asarray(active if active is not None else [True] * B),
        history_BC=jnp.asarray(history, jnp.int32),
        len_B=jnp.asarray(lengths, jnp.int32),
        max_len_B=jnp.full(B, max_len, jnp.int32),
        pages_BM=jnp.asarray([pages_of(row) for row in rows], jnp.int32),
        table=table,
    )


@functools.cache
def programs(proposer):
    return jax.jit(proposer.prefill), jax.jit(proposer.propose)


SEEN = np.random.default_rng(0).standard_normal((ROWS, 2 * MAX_LEN, 8 * 4)).astype(np.float32)


def seen_of(proposer, row, start, num):
    """What the target saw of a row from `start` on, NaN for a proposer that must not look."""
    width = 8 * (1 + len(proposer.aux_streams))
    seen = SEEN[row : row + 1, start : start + num, :width]
    return seen if proposer.commit is not None else np.full_like(seen, np.nan)


def fill(proposer, state, row, start, end):
    """The state once a chunk of a row's prompt went through prefill."""
    seen = seen_of(proposer, row, start, MAX_LEN)
    return programs(proposer)[0](make_weights(), state, np.array([row], np.int32), tokens_of(row, start, end), seen)


def filled(proposer, state, lengths):
    """The state once all but the last token of each row's first `lengths` went through prefill, in two chunks."""
    for row, length in enumerate(lengths):
        for start, end in ((0, (length - 1) // 2), ((length - 1) // 2, length - 1)):
            state = fill(proposer, state, row, start, end)
    return state


def guess(proposer, state, view):
    drafts, _ = programs(proposer)[1](make_weights(), state, view)
    return np.asarray(drafts.token_ids_BK), np.asarray(drafts.counts_B), drafts.logits_BKV


LENGTHS = [9, 12, 7]


def test_the_state_comes_back_as_it_went(proposer, state):
    def propose(weights, state, view):
        drafts, state = proposer.propose(weights, state, view)
        return state, drafts

    if jax.tree.leaves(state):
        tokens = tokens_of(1, 0, 4)
        seen = seen_of(proposer, 1, 0, MAX_LEN)
        check_step(proposer.prefill, 1, make_weights(), state, np.array([1], np.int32), tokens, seen)
    check_step(propose, 1, make_weights(), filled(proposer, state, LENGTHS), view_of([0, 1, 2], LENGTHS))


def test_guesses_have_the_form_of_drafts(proposer, state):
    ids_BK, counts_B, logits = guess(proposer, filled(proposer, state, LENGTHS), view_of([0, 1, 2], LENGTHS))
    K = proposer.num_tokens
    assert (ids_BK.shape, ids_BK.dtype, counts_B.shape, counts_B.dtype) == ((3, K), np.int32, (3,), np.int32)
    assert (counts_B >= min(K, 1)).all()  # these histories repeat, so that everyone has something to say
    is_draft_BK = np.arange(K) < counts_B[:, None]
    assert ((ids_BK >= 0) == is_draft_BK).all()
    assert (ids_BK < V).all()
    if logits is not None:
        assert (logits.shape, logits.dtype) == ((3, K, V), jnp.float32)
        drawn_from = np.asarray(logits)[is_draft_BK]
        # -inf where the drafter's vocabulary ends; what was drawn has a probability.
        assert (np.isfinite(drawn_from) | np.isneginf(drawn_from)).all()
        assert np.isfinite(np.take_along_axis(drawn_from, ids_BK[is_draft_BK][:, None], axis=1)).all()


def test_rows_that_are_not_active_say_nothing_and_keep_their_state(proposer, state):
    state = filled(proposer, state, LENGTHS)
    view = view_of([0, 1, 2], LENGTHS, active=[True, False, True])
    drafts, after = programs(proposer)[1](make_weights(), state, view)
    assert int(drafts.counts_B[1]) == 0
    assert (np.asarray(drafts.token_ids_BK)[1] == -1).all()
    # Row 1, woken up, says what it would have said.
    only = [False, True, False]
    woken, _, _ = guess(proposer, after, view_of([0, 1, 2], LENGTHS, active=only))
    asked, _, _ = guess(proposer, state, view_of([0, 1, 2], LENGTHS, active=only))
    np.testing.assert_array_equal(woken, asked)


def test_a_row_does_not_depend_on_its_place_or_neighbours(proposer, state):
    state = filled(proposer, state, LENGTHS)
    together, _, _ = guess(proposer, state, view_of([0, 1, 2], LENGTHS))
    permuted, _, _ = guess(proposer, state, view_of([2, 0, 1], [LENGTHS[row] for row in (2, 0, 1)]))
    np.testing.assert_array_equal(permuted, together[[2, 0, 1]])
    for row in range(ROWS):
        is_row = [other == row for other in range(ROWS)]
        alone, _, _ = guess(proposer, state, view_of([0, 1, 2], LENGTHS, active=is_row))
        np.testing.assert_array_equal(alone[row], together[row])


@pytest.mark.parametrize("name", heavy_but(HEADS, lambda name: name == "dspark"))
def test_nothing_is_read_that_was_not_written(name):
    """Pools are NaN where nothing was: what drafts are drawn from is numbers, behind prompts and behind a round."""
    proposer = head_proposer(name, "probabilistic")
    state = filled(proposer, make_state(proposer).proposer, LENGTHS)
    view = view_of([0, 1, 2], LENGTHS)
    assert not np.isnan(guess(proposer, state, view)[2]).any()
    seen = np.concatenate([seen_of(proposer, row, LENGTHS[row] - 1, K + 1) for row in range(ROWS)])
    _, state = programs(proposer)[1](make_weights(), state, view)
    state = jax.jit(proposer.commit)(state, view, seen, np.array([1, K + 1, 2], np.int32))
    lengths = [length + more for length, more in zip(LENGTHS, (1, K + 1, 2), strict=True)]
    assert not np.isnan(guess(proposer, state, view_of([0, 1, 2], lengths))[2]).any()


SIZES = {  # what is not asked for every number in tests/lossless/test_every_proposer.py
    "ngram": lambda k: ngram(num_tokens=k, min_n=1, max_n=3, max_model_len=MAX_LEN),
    "pard": lambda k: DRAFT(sample_method="greedy", num_tokens=k, mask_token_id=V - 1),
    "self": lambda k: own_layers(num_tokens=k),
    **{name: lambda k, name=name: head_proposer(name, num_tokens=k) for name in HEADS},
}


@pytest.mark.parametrize("name", heavy_but(SIZES, lambda name: name == "ngram"))
def test_fewer_drafts_are_the_first_of_more(name):
    """As many as were asked for, from one on; but a block whose places see each other says other things."""
    most = None
    for k in range(MOST, 0, -1):
        proposer = stand_alone(SIZES[name](k))
        state = filled(proposer, make_state(proposer).proposer, LENGTHS)
        ids_BK, counts_B, _ = guess(proposer, state, view_of([0, 1, 2], LENGTHS))
        most = most or (ids_BK, counts_B)
        assert ids_BK.shape == (3, k)
        np.testing.assert_array_equal(counts_B, np.minimum(most[1], k))
        if name not in ("dflash", "dspark"):
            np.testing.assert_array_equal(ids_BK, most[0][:, :k])
    assert name == "ngram" or (most[1] == MOST).all()


@pytest.mark.parametrize("garbage", [-1, 1, 7, 2**31 - 1])
def test_what_stands_behind_the_committed_tokens_does_not_matter(proposer, state, garbage):
    state = filled(proposer, state, LENGTHS)
    clean, clean_counts, _ = guess(proposer, state, view_of([0, 1, 2], LENGTHS))
    ids_BK, counts_B, _ = guess(proposer, state, view_of([0, 1, 2], LENGTHS, garbage=garbage))
    np.testing.assert_array_equal(ids_BK, clean)
    np.testing.assert_array_equal(counts_B, clean_counts)


@pytest.mark.parametrize("length", [MAX_LEN - 3, MAX_LEN - 2, MAX_LEN - 1, MAX_LEN])
def test_nothing_is_guessed_past_the_models_length(proposer, state, length):
    lengths = [length] * 3
    ids_BK, counts_B, _ = guess(proposer, filled(proposer, state, lengths), view_of([0, 1, 2], lengths))
    assert (counts_B <= MAX_LEN - length).all()
    assert ((ids_BK >= 0) == (np.arange(proposer.num_tokens) < counts_B[:, None])).all()


def test_one_token_rows(proposer, state):
    state = filled(proposer, state, [1, 1, 1])
    ids_BK, counts_B, _ = guess(proposer, state, view_of([0, 1, 2], [1, 1, 1]))
    assert ((ids_BK >= 0) == (np.arange(proposer.num_tokens) < counts_B[:, None])).all()
    assert (ids_BK < V).all()


def test_a_committed_round_is_as_good_as_a_prompt(proposer, state):
    """Whatever a round committed, and however it was cut before: the next guesses are those after a prompt of the same
    tokens. Rejected drafts, rows of other lengths and rows that sat the round out leave no trace."""
    if proposer.commit is None:
        return
    commit = jax.jit(proposer.commit)
    K, kept = proposer.num_tokens, [1, proposer.num_tokens + 1, 2]
    state = filled(proposer, state, LENGTHS)
    for active in ([True, False, True], [False, True, False]):
        view = view_of([0, 1, 2], LENGTHS, active=active)
        _, state = programs(proposer)[1](make_weights(), state, view)
        seen = np.concatenate([seen_of(proposer, row, LENGTHS[row] - 1, K + 1) for row in range(ROWS)])
        state = commit(state, view, seen, np.where(active, kept, 0).astype(np.int32))
    lengths = [length + more for length, more in zip(LENGTHS, kept, strict=True)]
    ids_BK, counts_B, _ = guess(proposer, state, view_of([0, 1, 2], lengths))
    wanted, wanted_counts, _ = guess(proposer, filled(proposer, state, lengths), view_of([0, 1, 2], lengths))
    np.testing.assert_array_equal(counts_B, wanted_counts)
    np.testing.assert_array_equal(ids_BK, wanted)
    assert (counts_B > 0).all()


def test_commit_gives_the_state_back_as_it_went(proposer, state):
    if proposer.commit is None:
        return
    seen = np.concatenate([seen_of(proposer, row, 5, proposer.num_tokens + 1) for row in range(ROWS)])
    for num_positions in (proposer.num_tokens + 1, 1):  # a round without drafts runs one
        check_step(
            proposer.commit, 0, state, view_of([0, 1, 2], LENGTHS), seen[:, :num_positions], jnp.ones(3, jnp.int32)
        )


@pytest.mark.parametrize("cut", [1, 3, 8])
def test_how_a_prompt_was_cut_does_not_matter(proposer, state, cut):
    whole = filled(proposer, state, LENGTHS)
    pieces = state
    for row, length in enumerate(LENGTHS):
        for start in range(0, length - 1, cut):
            pieces = fill(proposer, pieces, row, start, min(start + cut, length - 1))
    view = view_of([0, 1, 2], LENGTHS)
    np.testing.assert_array_equal(guess(proposer, pieces, view)[0], guess(proposer, whole, view)[0])


@pytest.mark.parametrize(("num_shared", "cut"), [(1, 8), (2, 1), (2, 3)])
def test_pages_of_another_row_are_as_good_as_ones_own(proposer, state, num_shared, cut):
    """A row whose first pages another has filled guesses what it would have, leaves those as they are, and takes
    nothing from the request before it; so does a row that goes on with an answer, which is a longer prompt."""
    if proposer.page_lookahead is None:
        return
    length, start, row = 15, num_shared * PAGE_SIZE, 2
    assert length - 1 - start >= max(1, proposer.page_lookahead)
    donor = filled(proposer, state, [length])
    lengths, only = [length, 1, 1], [True, False, False]
    wanted, wanted_counts, _ = guess(proposer, donor, view_of([0, 1, 2], lengths, active=only))
    # The row's last request ended where the shared pages end: its state must not be taken for this one's.
    donor = fill(proposer, donor, row, 0, start)
    if proposer.forget is not None:
        donor = jax.jit(proposer.forget)(donor, np.int32(row))
    pages = pages_of(0)[:num_shared] + pages_of(row)[num_shared:]
    pages_1M, after = jnp.asarray([pages], jnp.int32), donor
    for at in range(start, length - 1, cut):
        tokens = tokens_of(0, at, min(at + cut, length - 1))
        slots_1T = slots_of(tokens.positions_BT, pages_1M, PAGE_SIZE)
        tokens = dataclasses.replace(tokens, pages_BM=pages_1M, slots_BT=slots_1T)
        seen = seen_of(proposer, 0, at, MAX_LEN)
        after = programs(proposer)[0](make_weights(), after, np.array([row], np.int32), tokens, seen)
    view = view_of([0, 1, 2], lengths, active=only)
    view = dataclasses.replace(
        view, rows_B=jnp.asarray([row, 1, 0], jnp.int32), pages_BM=view.pages_BM.at[0].set(pages_1M[0])
    )
    drafts, last = programs(proposer)[1](make_weights(), after, view)
    np.testing.assert_array_equal(drafts.counts_B, wanted_counts)
    np.testing.assert_array_equal(drafts.token_ids_BK, wanted)
    for one, other in zip(jax.tree.leaves(donor), jax.tree.leaves(last), strict=True):
        if one.ndim == 4 and one.shape[0] % NUM_PAGES == 0:
            layers = np.arange(one.shape[0] // NUM_PAGES)[:, None] * NUM_PAGES
            shared = (layers + np.array(pages[:num_shared])).ravel()
            np.testing.assert_array_equal(np.asarray(one)[shared], np.asarray(other)[shared])
