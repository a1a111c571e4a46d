"""Device. What a proposer keeps, from one round to the next, of what the target saw."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.models.base import Tokens
from jaxspec.proposers.base import RowView


@struct.dataclass
class Seen:
    """Of each row the target's states at positions [first, first + count), which the proposer has not taken in yet.

    While a row drafts, first + count is its length less one: the last committed token has not gone through the target.
    """

    states_RJX: jax.Array  # f32
    first_R: jax.Array  # i32
    count_R: jax.Array  # i32, 0..J


def nothing_seen(num_rows: int, num_positions: int, size: int) -> Seen:
    """Of rows that hold no request yet."""
    return Seen(
        states_RJX=jnp.zeros((num_rows, num_positions, size), jnp.float32),
        first_R=jnp.zeros(num_rows, jnp.int32),
        count_R=jnp.zeros(num_rows, jnp.int32),
    )


def see_prompt(seen: Seen, rows_B: jax.Array, tokens: Tokens, seen_BTX: jax.Array, *, keep: int) -> Seen:
    """After a chunk of a prompt: its last `keep` (0 or 1) positions are still to be taken in."""
    num_B = jnp.sum((tokens.positions_BT >= 0).astype(jnp.int32), axis=1)
    end_B = jnp.max(tokens.positions_BT, axis=1) + 1
    count_B = jnp.minimum(num_B, keep)
    last_BX = jnp.take_along_axis(seen_BTX, jnp.maximum(num_B - 1, 0)[:, None, None], axis=1)[:, 0]
    return Seen(
        states_RJX=seen.states_RJX.at[rows_B, 0].set(last_BX) if keep else seen.states_RJX,
        first_R=seen.first_R.at[rows_B].set(end_B - count_B),
        count_R=seen.count_R.at[rows_B].set(count_B),
    )


def see_round(seen: Seen, view: RowView, seen_BJX: jax.Array, num_kept_B: jax.Array) -> Seen:
    """After a round: the positions of the last committed token and of the drafts that were kept.

    Rows that are not active keep what they had, the guard row that pads a batch among them.
    """
    J = seen_BJX.shape[1]
    rows_B = jnp.where(view.is_active_B, view.rows_B, seen.first_R.shape[0])  # past the end: dropped
    return Seen(
        states_RJX=seen.states_RJX.at[rows_B, :J].set(seen_BJX, mode="drop"),
        first_R=seen.first_R.at[rows_B].set(view.len_B - 1, mode="drop"),
        count_R=seen.count_R.at[rows_B].set(num_kept_B, mode="drop"),
    )


def forget_row(seen: Seen, row: jax.Array) -> Seen:
    """A request takes the row (i32[]): nothing of it was seen yet."""
    return dataclasses.replace(seen, count_R=seen.count_R.at[row].set(0))


def to_take_in(seen: Seen, view: RowView) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(states_BJX, positions_BJ, is_ready_B): what a round's first pass reads, positions -1 beyond it.

    A row is ready when nothing is missing between what was taken in, this, and its last committed token.
    """
    states_BJX = seen.states_RJX[view.rows_B]
    first_B, count_B = seen.first_R[view.rows_B], seen.count_R[view.rows_B]
    is_ready_B = view.is_active_B & (first_B + count_B == view.len_B - 1)
    j_1J = jnp.arange(states_BJX.shape[1], dtype=jnp.int32)[None, :]
    is_new_BJ = (j_1J < count_B[:, None]) & is_ready_B[:, None]
    positions_BJ = jnp.where(is_new_BJ, first_B[:, None] + j_1J, -1)
    return jnp.where(is_new_BJ[:, :, None], states_BJX, 0.0), positions_BJ, is_ready_B
