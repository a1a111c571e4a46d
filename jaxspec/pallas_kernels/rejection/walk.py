"""Device. Drafts front to back, a few rows of logits a turn, as far as each request's drafts stand."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

T = TypeVar("T")  # a tree of arrays, an entry a row

# Rows of logits that are looked at together: their passes stay in a core's cache, and share the work among cores.
_ROWS_A_TURN = 4
_ENTRIES_A_TURN = 2**15  # at least: of rows as small as that a turn costs more than what it may spare
# What a turn notes down grows with the requests, and so do the turns: more than these are looked at all at once.
_MOST_REQUESTS = 256


def walk(
    look: Callable[[jax.Array, jax.Array, jax.Array], T],
    stands: Callable[[T, jax.Array], jax.Array],
    unseen_R: T,
    row_size: int,
    rows_N: Int32[Array, " N"],
    bonus_rows_B: Int32[Array, " B"],
    start_B: Int32[Array, " B"],
    num_drafts_B: Int32[Array, " B"],
) -> T:
    """Looks at each request's rows, and, but for batches of very many, at nothing behind the first whose draft does not
    stand.

    Args:
        look: (rows_X, n_X, is_on_X) -> what a few rows of logits are like, a tree of [X]; n: the draft that the row
            judges, any for a bonus. What it finds where is_on_X is false is dropped.
        stands: (what was found, n_X) -> bool[X], whether the rows behind the draft matter.
        unseen_R: what stands for rows nobody looked at.
        row_size: entries of a row of logits.
        rows_N, bonus_rows_B: the rows that judge drafts, and that give the tokens after them.
        start_B, num_drafts_B: a request's segment of the drafts.
    Returns: a tree of [R].
    """
    num_rows = jax.tree.leaves(unseen_R)[0].shape[0]
    num_requests, num_drafts = bonus_rows_B.shape[0], rows_N.shape[0]
    if num_requests > _MOST_REQUESTS:
        n_N = jnp.arange(num_drafts, dtype=jnp.int32)
        at_N = jnp.where(n_N < jnp.max(start_B + num_drafts_B), rows_N, num_rows)  # padding judges nothing
        n_R = jnp.zeros(num_rows, jnp.int32).at[at_N].set(n_N, mode="drop")
        return look(jnp.arange(num_rows, dtype=jnp.int32), n_R, jnp.ones(num_rows, bool))
    most_places = -(-num_drafts // num_requests) + 1
    rows_a_turn = max(_ROWS_A_TURN, _ENTRIES_A_TURN // row_size)
    # Where there are few requests, some places of each at once.
    num_turns = -(-most_places // max(1, rows_a_turn // num_requests))
    num_places = -(-most_places // num_turns)
    num_chosen = min(num_requests, max(1, rows_a_turn // num_places))
    offset_P = jnp.arange(num_places, dtype=jnp.int32)

    def turn(state: tuple[jax.Array, jax.Array, T]) -> tuple[jax.Array, jax.Array, T]:
        place_B, is_open_B, seen = state
        order_B = jnp.cumsum(is_open_B, dtype=jnp.int32) - 1
        is_chosen_QB = is_open_B[None] & (order_B[None] == jnp.arange(num_chosen, dtype=jnp.int32)[:, None])
        request_Q = jnp.argmax(is_chosen_QB, axis=1).astype(jnp.int32)
        place_QP = place_B[request_Q][:, None] + offset_P[None]
        is_draft_QP = place_QP < num_drafts_B[request_Q][:, None]
        is_on_QP = jnp.any(is_chosen_QB, axis=1)[:, None] & (place_QP <= num_drafts_B[request_Q][:, None])
        request_X, is_draft_X, is_on_X = (
            jnp.repeat(request_Q, num_places),
            is_draft_QP.reshape(-1),
            is_on_QP.reshape(-1),
        )
        rows_X, n_X = bonus_rows_B[request_X], jnp.zeros_like(request_X)
        if num_drafts:
            n_X = jnp.clip(start_B[request_X] + place_QP.reshape(-1), 0, num_drafts - 1)
            rows_X = jnp.where(is_draft_X, rows_N[n_X], rows_X)
        new = look(rows_X, n_X, is_on_X)

        # Selects and not scatters, which XLA's CPU backend runs an entry at a time.
        is_at_XR = is_on_X[:, None] & (rows_X[:, None] == jnp.arange(num_rows, dtype=jnp.int32)[None])
        is_new_R, from_R = jnp.any(is_at_XR, axis=0), jnp.argmax(is_at_XR, axis=0)
        seen = jax.tree.map(lambda old_R, new_X: jnp.where(is_new_R, new_X[from_R], old_R), seen, new)
        if not num_drafts:
            goes_on_Q = jnp.zeros(request_Q.shape, bool)
        else:
            goes_on_Q = jnp.all((stands(new, n_X) & is_draft_X).reshape(num_chosen, num_places), axis=1)
        is_visited_B = jnp.any(is_chosen_QB, axis=0)
        goes_on_B = jnp.any(is_chosen_QB & goes_on_Q[:, None], axis=0)
        return place_B + jnp.where(is_visited_B, num_places, 0), is_open_B & (~is_visited_B | goes_on_B), seen

    state = (jnp.zeros_like(start_B), jnp.ones(start_B.shape, bool), unseen_R)
    return lax.while_loop(lambda state: jnp.any(state[1]), turn, state)[2]
