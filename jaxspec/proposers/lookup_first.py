"""Device. Looks a row up in itself first, and lets another proposer draft for the rows where nothing was found."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec import shards
from jaxspec.proposers.base import Proposer, ProposerState, RowView
from jaxspec.proposers.ngram import Match, match
from jaxspec.types import Drafts


def lookup_first(
    inner: Proposer, *, min_n: int, max_n: int, max_model_len: int, match_rule: Match = "earliest"
) -> Proposer:
    """Any device proposer behind prompt lookup; the other arguments are `ngram`'s, and K is the inner's.

    The inner proposer sees every round: of a row that was found it takes in what was committed, and has no room to
    draft (its view's max_len says so), so that its state is right when it is asked next. A round in which every row was
    found ends with that first pass.
    """

    def propose(weights, state: ProposerState, view: RowView) -> tuple[Drafts, ProposerState]:
        found = match(
            view.history_BC,
            jnp.where(view.is_active_B, view.len_B, 0),
            min_n=min_n,
            max_n=max_n,
            num_tokens=inner.num_tokens,
            max_model_len=max_model_len,
            prompt_lookup_match=match_rule,
        )
        is_found_B = found.counts_B > 0
        rest = dataclasses.replace(view, max_len_B=jnp.where(is_found_B, view.len_B, view.max_len_B))
        drafts, state = inner.propose(weights, state, rest)
        logits_BKV = drafts.logits_BKV
        if logits_BKV is not None:
            logits_BKV = jnp.where(is_found_B[:, None, None], point_mass(found.token_ids_BK, logits_BKV), logits_BKV)
        return Drafts(
            token_ids_BK=jnp.where(is_found_B[:, None], found.token_ids_BK, drafts.token_ids_BK),
            counts_B=jnp.where(is_found_B, found.counts_B, drafts.counts_B),
            logits_BKV=logits_BKV,
        ), state

    return inner._replace(propose=propose)


def point_mass(token_ids_BK: jax.Array, like_BKV: jax.Array) -> jax.Array:
    """Logits of the distribution that gives these tokens for certain, over the ids of `like_BKV`; all alike where there
    is no token (-1)."""
    v_11V = shards.ids_of(like_BKV)[None, None, :]
    ids_BK1 = token_ids_BK[:, :, None]
    return jnp.where((v_11V == ids_BK1) | (ids_BK1 < 0), 0.0, -jnp.inf)
