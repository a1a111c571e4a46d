"""Device. Many drafters in one engine: all of them guess in every round, and one, in turn, is listened to."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.proposers.base import Proposer
from jaxspec.types import Drafts


@struct.dataclass
class Turns:
    """weights, states: each drafter's own; drafted_n: i32, rows that a drafter said something for in its turns."""

    weights: list[Any]
    states: list[Any]
    num_rounds: jax.Array  # i32[]
    drafted_n: jax.Array


def in_turns(proposers: Sequence[Proposer], weights: Sequence[Any], hidden_size: int) -> Proposer:
    """One proposer of many that draft greedily, as many tokens each.

    Args:
        weights: each one's draft weights, or None.
        hidden_size: the target's.
    """
    streams = tuple(sorted({stream for proposer in proposers for stream in proposer.aux_streams}))
    num_tokens = proposers[0].num_tokens

    def part_of(seen_BTX, proposer: Proposer):
        """What this one asked to see."""
        parts = [0, *(1 + streams.index(stream) for stream in proposer.aux_streams)]
        return jnp.concatenate(
            [seen_BTX[:, :, part * hidden_size : (part + 1) * hidden_size] for part in parts], axis=-1
        )

    def each(turns: Turns, target):
        """(proposer, its weights, its state), one by one."""
        for proposer, own, state in zip(proposers, turns.weights, turns.states, strict=True):
            yield proposer, {"target": target, "draft": own}, state

    def init(num_rows: int) -> Turns:
        return Turns(
            weights=jax.tree.map(jnp.array, list(weights)),  # copies: states are donated
            states=[proposer.init(num_rows) for proposer in proposers],
            num_rounds=jnp.int32(0),
            drafted_n=jnp.zeros(len(proposers), jnp.int32),
        )

    def prefill(weights, turns: Turns, rows_B, tokens, seen_BTX):
        return turns.replace(
            states=[
                proposer.prefill(own, state, rows_B, tokens, part_of(seen_BTX, proposer))
                for proposer, own, state in each(turns, weights["target"])
            ]
        )

    def propose(weights, turns: Turns, view):
        found = [proposer.propose(own, state, view) for proposer, own, state in each(turns, weights["target"])]
        turn = turns.num_rounds % len(proposers)
        counts_B = jnp.stack([drafts.counts_B for drafts, _ in found])[turn]
        drafts = Drafts(token_ids_BK=jnp.stack([drafts.token_ids_BK for drafts, _ in found])[turn], counts_B=counts_B)
        turns = turns.replace(
            states=[state for _, state in found],
            num_rounds=turns.num_rounds + 1,
            drafted_n=turns.drafted_n.at[turn].add(jnp.sum((counts_B > 0).astype(jnp.int32))),
        )
        return drafts, turns

    def commit(turns: Turns, view, seen_BJX, num_kept_B):
        return turns.replace(
            states=[
                state
                if proposer.commit is None
                else proposer.commit(state, view, part_of(seen_BJX, proposer), num_kept_B)
                for proposer, state in zip(proposers, turns.states, strict=True)
            ]
        )

    def forget(turns: Turns, row):
        return turns.replace(
            states=[
                state if proposer.forget is None else proposer.forget(state, row)
                for proposer, state in zip(proposers, turns.states, strict=True)
            ]
        )

    return Proposer(
        num_tokens, init, prefill, propose, commit, streams, forget=forget, sees_plain_rounds=True,
        page_lookahead=max(proposer.page_lookahead or 0 for proposer in proposers),
    )  # fmt: skip
