"""Device. A proposer that is wrong now and then, on purpose: what surrounds its errors shows whether it recovers."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.proposers.base import Proposer


@struct.dataclass
class Misled:
    """The proposer's own state, and how many rounds each row has had."""

    inner: object
    rounds_R: jax.Array


def wrong_every(every: int, inner: Proposer, weights_of, vocab_size: int) -> Proposer:
    """In each row's round `every`, 2 * `every` and so on the first guess is made another token.

    weights_of: from the engine's weights to those that the proposer reads.
    """

    def init(num_rows):
        return Misled(inner=inner.init(num_rows), rounds_R=jnp.zeros(num_rows, jnp.int32))

    def prefill(weights, state, rows_B, tokens, seen_BTX):
        inner_state = inner.prefill(weights_of(weights), state.inner, rows_B, tokens, seen_BTX)
        return Misled(inner=inner_state, rounds_R=state.rounds_R.at[rows_B].set(0))

    def propose(weights, state, view):
        drafts, inner_state = inner.propose(weights_of(weights), state.inner, view)
        rounds_B = state.rounds_R[view.rows_B] + 1
        is_misled_B = (rounds_B % every == 0) & view.is_active_B
        ids_BK = drafts.token_ids_BK
        first_B = jnp.where(is_misled_B & (ids_BK[:, 0] >= 0), (ids_BK[:, 0] + 1) % vocab_size, ids_BK[:, 0])
        drafts = dataclasses.replace(drafts, token_ids_BK=ids_BK.at[:, 0].set(first_B))
        return drafts, Misled(inner=inner_state, rounds_R=state.rounds_R.at[view.rows_B].set(rounds_B))

    def commit(state, view, seen_BJX, num_kept_B):
        assert inner.commit is not None
        return state.replace(inner=inner.commit(state.inner, view, seen_BJX, num_kept_B))

    return Proposer(
        inner.num_tokens, init, prefill, propose, None if inner.commit is None else commit, inner.aux_streams
    )


def expected_histogram(
    num_tokens: int, K: int, every: int, *, first_is_plain: bool = False, drafts_all_or_none: bool = False
):
    """Verify steps by how many drafts they keep, where all are right but for the misled rounds' first."""
    histogram, done, rounds = [0] * (K + 1), 0, 0
    while done < num_tokens:
        rounds += 1
        drafts = 0 if first_is_plain and rounds == 1 else min(K, num_tokens - done - 1)
        drafts = 0 if drafts_all_or_none and drafts < K else drafts
        accepted = 0 if rounds % every == 0 else drafts
        if drafts:
            histogram[accepted] += 1
        done += accepted + 1
    return histogram
