"""Device. What methods share that read nothing but the target's last state: they keep one position a row."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.models.base import Tokens
from jaxspec.proposers.base import RowView
from jaxspec.proposers.seen import Seen, nothing_seen, see_prompt, see_round, to_take_in


def last_state_functions(hidden_size: int):
    """(init, prefill, commit) of a `Proposer` whose state is the row's last seen position."""

    def init(num_rows: int) -> Seen:
        return nothing_seen(num_rows, 1, hidden_size)

    def prefill(weights, state: Seen, rows_B, tokens: Tokens, seen_BTX) -> Seen:
        del weights
        return see_prompt(state, rows_B, tokens, seen_BTX, keep=1)

    def commit(state: Seen, view: RowView, seen_BJX, num_kept_B) -> Seen:
        """The state behind the last token but one that was kept, whose successor is the last."""
        at_B = jnp.maximum(num_kept_B - 1, 0)
        last_B1X = jnp.take_along_axis(seen_BJX, at_B[:, None, None], axis=1)
        moved = dataclasses.replace(view, len_B=view.len_B + at_B)
        return see_round(state, moved, last_B1X, jnp.minimum(num_kept_B, 1))

    return init, prefill, commit


def last_state_of(state: Seen, view: RowView) -> tuple[jax.Array, jax.Array]:
    """(hidden_BD, can_draft_B): the state whose successor is each row's last committed token."""
    states_B1X, positions_B1, _ = to_take_in(state, view)
    return states_B1X[:, 0], positions_B1[:, 0] >= 0
