"""Device. The pure programs of decoding: propose, verify_commit, and the round that is one after the other."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec import shards
from jaxspec.cache.pages import slots_of
from jaxspec.models.base import Tokens
from jaxspec.proposers.base import Proposer, RowView
from jaxspec.proposers.widths import best_width, narrowest
from jaxspec.sampling.logprobs import no_logprobs
from jaxspec.step.judge import judge
from jaxspec.step.prefill import hidden_of
from jaxspec.step.state import Batch, DecodeState, RoundOutput
from jaxspec.step.target import Target
from jaxspec.types import Drafts, Pool, TokenLogprobs, Verdict


def row_view(state: DecodeState, batch: Batch) -> RowView:
    """The batch's rows of the row tables."""
    rows_B = batch.rows_B
    return RowView(
        rows_B=rows_B,
        is_active_B=~state.is_finished_R[rows_B],
        history_BC=state.history_RC[rows_B],
        len_B=state.len_R[rows_B],
        max_len_B=state.max_len_R[rows_B],
        pages_BM=batch.pages_BM,
        table=jax.tree.map(lambda leaf: leaf[rows_B], state.table),
    )


def propose(proposer: Proposer, weights: Any, state: DecodeState, batch: Batch) -> tuple[Drafts, DecodeState]:
    """Draft up to K tokens a row, no more than the row can use. Of the state only the proposer's part changes, or,
    where that is the target's pool, what lies behind the committed tokens' keys. Where no row may draft the proposer is
    not asked, unless it must see every round."""
    part = "pool" if proposer.is_in_target_pool else "proposer"
    max_drafts_B = jnp.minimum(state.max_drafts_R[batch.rows_B], batch.max_drafts)
    view = dataclasses.replace(row_view(state, batch), max_drafts_B=max_drafts_B)

    def ask(changed) -> tuple[Drafts, Any]:
        return proposer.propose(weights, changed, view)

    with jax.named_scope("draft"):
        if proposer.sees_plain_rounds or proposer.num_tokens == 0:
            drafts, changed = ask(getattr(state, part))
        else:
            drafts, changed = _run_if(jnp.any(view.is_active_B & (max_drafts_B > 0)), ask, getattr(state, part))
    return cut_drafts(state, batch, drafts), dataclasses.replace(state, **{part: changed})


def _run_if(condition: jax.Array, ask: Callable, changed: Any) -> tuple[Drafts, Any]:
    """ask(changed), or no drafts and `changed` as it is; in place, as `_forward_of_width` says."""
    ask = jax.jit(ask)  # traced once, for the shapes and in the loop
    drafts = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(ask, changed)[0])
    drafts = dataclasses.replace(drafts, logits_BKV=shards.split(drafts.logits_BKV))
    _, drafts, changed = lax.while_loop(
        lambda carry: carry[0], lambda carry: (jnp.zeros((), jnp.bool_), *ask(carry[2])), (condition, drafts, changed)
    )
    return drafts, changed


def cut_drafts(state: DecodeState, batch: Batch, drafts: Drafts) -> Drafts:
    """The same drafts, fewer where the row has ended, wants fewer, or has no room for more."""
    rows_B = batch.rows_B
    # The last position yields a token of its own, so a row with r tokens to go can use r - 1 drafts.
    most_B = jnp.minimum(state.max_len_R[rows_B] - state.len_R[rows_B] - 1, drafts.token_ids_BK.shape[1])
    most_B = jnp.minimum(most_B, jnp.minimum(state.max_drafts_R[rows_B], batch.max_drafts))
    counts_B = jnp.where(state.is_finished_R[rows_B], 0, jnp.clip(drafts.counts_B, 0, jnp.maximum(most_B, 0)))
    return dataclasses.replace(drafts, counts_B=counts_B)


def verify_commit(
    target: Target, proposer: Proposer, weights: Any, state: DecodeState, batch: Batch, drafts: Drafts
) -> tuple[DecodeState, RoundOutput]:
    """Check K drafts a row in one forward pass of J = K + 1 positions, and commit what survives.

    Args:
        proposer: the device's, which may want to know what the target saw.
        weights: {"target": ..., ...}.
        state: donated.
        batch: B rows.
        drafts: K a row, K from their shape; already cut (`cut_drafts`).

    Returns:
        The state with tokens, lengths, finish flags and pages updated, and what the host reads.
    """
    state, logits_BJV, seen_BJX = forward(target, proposer, weights, state, batch, drafts)
    return judge_commit(target, proposer, state, batch, drafts, logits_BJV, seen_BJX)


def forward(
    target: Target, proposer: Proposer, weights: Any, state: DecodeState, batch: Batch, drafts: Drafts
) -> tuple[DecodeState, jax.Array, jax.Array | None]:
    """One pass over the last committed token and the drafts: the state with new pages, f32 logits_BJV, and seen_BJX
    if the proposer's `commit` wants it."""
    view = row_view(state, batch)
    K = drafts.token_ids_BK.shape[1]
    with jax.named_scope("verify"):
        j_1J = jnp.arange(K + 1, dtype=jnp.int32)[None, :]
        is_fed_BJ = (j_1J <= drafts.counts_B[:, None]) & view.is_active_B[:, None]
        positions_BJ = jnp.where(is_fed_BJ, view.len_B[:, None] - 1 + j_1J, -1)
        last_B1 = jnp.take_along_axis(view.history_BC, jnp.maximum(view.len_B - 1, 0)[:, None], axis=1)
        # A draft that is no token id is fed as 0 here and rejected later, by its own value.
        in_vocabulary_BK = (drafts.token_ids_BK >= 0) & (drafts.token_ids_BK < target.config.vocab_size)
        draft_ids_BK = jnp.where(in_vocabulary_BK, drafts.token_ids_BK, 0)
        tokens = Tokens(
            token_ids_BT=jnp.where(is_fed_BJ, jnp.concatenate([last_B1, draft_ids_BK], axis=1), 0),
            positions_BT=positions_BJ,
            slots_BT=slots_of(positions_BJ, batch.pages_BM, state.pool.shape[2]),
            pages_BM=batch.pages_BM,
        )
        seen_BJX, pool = target.family.forward(
            weights["target"], target.config, tokens, state.pool, proposer.aux_streams
        )
        logits_BJV = target.family.logits(weights["target"], target.config, hidden_of(target, proposer, seen_BJX))
    return dataclasses.replace(state, pool=pool), logits_BJV, None if proposer.commit is None else seen_BJX


def judge_commit(
    target: Target,
    proposer: Proposer,
    state: DecodeState,
    batch: Batch,
    drafts: Drafts,
    logits_BJV: jax.Array,
    seen_BJX: jax.Array | None,
    mask_BJU: jax.Array | None = None,
) -> tuple[DecodeState, RoundOutput]:
    """The verdict on the drafts from the target's logits, committed; then the proposer's `commit`, if it has one.

    seen_BJX: what `forward` gave; mask_BJU: a grammar's masks, if a row has one.
    """
    with jax.named_scope("reject"):
        verdict, logprobs = judge(target, state, batch, drafts, logits_BJV, mask_BJU)
    with jax.named_scope("commit"):
        view = row_view(state, batch)
        state, output = commit(state, batch, verdict, drafts.counts_B, logprobs)
        if proposer.commit is not None:
            assert seen_BJX is not None
            num_kept_B = state.len_R[batch.rows_B] - view.len_B
            state = dataclasses.replace(state, proposer=proposer.commit(state.proposer, view, seen_BJX, num_kept_B))
        return state, output


def commit(
    state: DecodeState, batch: Batch, verdict: Verdict, counts_B: jax.Array, logprobs: TokenLogprobs
) -> tuple[DecodeState, RoundOutput]:
    """Append the verdict's tokens to each active row, up to the first that finishes it."""
    rows_B = batch.rows_B
    len_B, max_len_B = state.len_R[rows_B], state.max_len_R[rows_B]
    is_active_B = ~state.is_finished_R[rows_B]
    j_1J = jnp.arange(verdict.token_ids_BJ.shape[1], dtype=jnp.int32)[None, :]
    is_new_BJ = (j_1J <= verdict.num_accepted_B[:, None]) & is_active_B[:, None]

    length_after_BJ = len_B[:, None] + j_1J + 1
    is_stop_BJ = jnp.any(verdict.token_ids_BJ[:, :, None] == state.stop_ids_RW[rows_B][:, None, :], axis=-1)
    is_stop_BJ &= length_after_BJ >= state.min_len_R[rows_B][:, None]
    ends_BJ = is_new_BJ & (is_stop_BJ | (length_after_BJ >= max_len_B[:, None]))
    ended_before_BJ = (jnp.cumsum(ends_BJ.astype(jnp.int32), axis=1) - ends_BJ.astype(jnp.int32)) > 0
    is_kept_BJ = is_new_BJ & ~ended_before_BJ
    num_kept_B = jnp.sum(is_kept_BJ.astype(jnp.int32), axis=1)

    token_ids_BJ = jnp.where(is_kept_BJ, verdict.token_ids_BJ, -1)
    column_BJ = jnp.where(is_kept_BJ, len_B[:, None] + j_1J, state.history_RC.shape[1])  # past the end: dropped
    state = dataclasses.replace(
        state,
        history_RC=state.history_RC.at[rows_B[:, None], column_BJ].set(token_ids_BJ, mode="drop"),
        len_R=state.len_R.at[rows_B].add(num_kept_B),
        is_finished_R=state.is_finished_R.at[rows_B].set(~is_active_B | jnp.any(ends_BJ, axis=1)),
    )
    num_accepted_B = jnp.where(is_active_B, verdict.num_accepted_B, 0)
    packed_BX = jnp.concatenate([token_ids_BJ, counts_B[:, None], num_accepted_B[:, None]], axis=1)
    return state, RoundOutput(packed_BX=packed_BX, logprobs=logprobs)


def decode_round(
    target: Target,
    proposer: Proposer,
    weights: Any,
    state: DecodeState,
    batch: Batch,
    *,
    widths: tuple[int, ...] | None = None,
) -> tuple[DecodeState, RoundOutput]:
    """One round: draft, verify, reject, commit.

    widths: how many drafts a row the forward pass can hold, ascending; 0 and K by default. It takes the narrowest that
    holds all drafts, or where the batch weighs them (`proposers.widths`) the one that pays best, which drops the rest.
    An `exact` target has one width.
    """
    drafts, state = propose(proposer, weights, state, batch)
    K = proposer.num_tokens
    widths = (K,) if target.exact or K == 0 else widths or (0, K)
    if len(widths) == 1:
        return verify_commit(target, proposer, weights, state, batch, drafts)
    if batch.survival_BK is None or batch.seconds_W is None:
        at = narrowest(jnp, drafts.counts_B, widths)
    else:
        is_active_B = ~state.is_finished_R[batch.rows_B]
        at = best_width(jnp, batch.survival_BK, drafts.counts_B, is_active_B, batch.seconds_W, widths)
    drafts = dataclasses.replace(drafts, counts_B=jnp.minimum(drafts.counts_B, jnp.asarray(widths, jnp.int32)[at]))
    state, logits_BJV, seen_BJX = _forward_of_width(target, proposer, weights, state, batch, drafts, widths, at)
    return judge_commit(target, proposer, state, batch, drafts, logits_BJV, seen_BJX)


def _forward_of_width(
    target: Target,
    proposer: Proposer,
    weights: Any,
    state: DecodeState,
    batch: Batch,
    drafts: Drafts,
    widths: tuple[int, ...],
    at: jax.Array,
) -> tuple[DecodeState, jax.Array, jax.Array | None]:
    """`forward` over the first widths[at] drafts of each row; what it gives of positions behind them is undefined.

    As `lax.switch`, but with the pool updated in place. XLA copies the whole page pool at the edges of a conditional
    (measured on CPU: twice a round). It never copies what a while loop carries, so each pass is a loop that runs once
    or not at all.
    """

    @functools.partial(jax.jit, static_argnums=1)  # traced once, for the shapes and in the loop
    def of_width(pool: Pool, width: int):
        cut = Drafts(token_ids_BK=drafts.token_ids_BK[:, :width], counts_B=jnp.minimum(drafts.counts_B, width))
        ran, logits_BJV, seen_BJX = forward(
            target, proposer, weights, dataclasses.replace(state, pool=pool), batch, cut
        )
        return ran.pool, logits_BJV, seen_BJX

    def buffer(leaf_BJX: jax.Array) -> jax.Array:
        return lax.empty((leaf_BJX.shape[0], drafts.token_ids_BK.shape[1] + 1, leaf_BJX.shape[2]), leaf_BJX.dtype)

    _, logits_BJV, seen_BJX = jax.eval_shape(of_width, state.pool, widths[-1])
    found = state.pool, shards.split(buffer(logits_BJV)), None if seen_BJX is None else buffer(seen_BJX)
    for number, width in reversed(list(enumerate(widths))):

        def body(carry, width=width):
            _, (pool, logits_BJV, seen_BJX) = carry
            pool, *new = of_width(pool, width)
            logits_BJV, seen_BJX = jax.tree.map(
                lambda all_BJX, new_BJX: all_BJX.at[:, : width + 1].set(new_BJX), (logits_BJV, seen_BJX), tuple(new)
            )
            return jnp.zeros((), jnp.bool_), (pool, logits_BJV, seen_BJX)

        _, found = lax.while_loop(lambda carry: carry[0], body, (at == number, found))
    pool, logits_BJV, seen_BJX = found
    return dataclasses.replace(state, pool=pool), logits_BJV, seen_BJX


def decode_rounds(
    target: Target,
    proposer: Proposer,
    max_rounds: int,
    weights: Any,
    state: DecodeState,
    batch: Batch,
    num_rounds,
    *,
    widths: tuple[int, ...] | None = None,
) -> tuple[DecodeState, RoundOutput]:
    """Up to `num_rounds` (i32 scalar, at most the static `max_rounds`) rounds before the host looks.

    It ends early when every row of the batch has finished. `widths` as `decode_round` takes them.

    Returns:
        The state and the outputs stacked (axis 0: max_rounds); rounds that did not run hold no token (-1) and no
        draft.
    """
    J = proposer.num_tokens + 1
    B = batch.rows_B.shape[0]
    if max_rounds == 1:
        state, output = decode_round(target, proposer, weights, state, batch, widths=widths)
        return state, jax.tree.map(lambda leaf: leaf[None], output)

    packed_BX = jnp.concatenate([jnp.full((B, J), -1, jnp.int32), jnp.zeros((B, 2), jnp.int32)], axis=1)
    empty = RoundOutput(packed_BX=packed_BX, logprobs=no_logprobs(B, J, target.max_logprobs))
    outputs = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (max_rounds, *leaf.shape)), empty)

    def goes_on(carry):
        i, state, _ = carry
        return (i < jnp.minimum(num_rounds, max_rounds)) & ~jnp.all(state.is_finished_R[batch.rows_B])

    def body(carry):
        i, state, outputs = carry
        state, output = decode_round(target, proposer, weights, state, batch, widths=widths)
        return i + 1, state, jax.tree.map(lambda all_, one: all_.at[i].set(one), outputs, output)

    _, state, outputs = lax.while_loop(goes_on, body, (jnp.int32(0), state, outputs))
    return state, outputs
