"""Device. Presence, frequency and repetition penalties: what they are, and their dense form on rows of logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxspec import shards

SEEN_IN_PROMPT = 2**30  # a bit of counts_BV


class Penalties(NamedTuple):
    """How often each token has occurred where logits are verified, and what that costs it. R: rows of the logits."""

    counts_BV: jax.Array  # i32, times the id occurs in the request's output so far; + SEEN_IN_PROMPT if in its prompt
    request_R: jax.Array  # i32, the request a row is of
    offset_R: jax.Array  # i32, how many of that request's drafts come before the row's token: they count as output
    presence_B: jax.Array  # f32, taken from the logit of each id that the output holds; 0 = off
    frequency_B: jax.Array  # f32, the same for each time it occurs; 0 = off
    repetition_B: jax.Array  # f32 > 0, divides a positive logit of an id in prompt or output, else multiplies; 1 = off


def has_penalty(presence_B: jax.Array, frequency_B: jax.Array, repetition_B: jax.Array) -> jax.Array:
    """bool, whether a request's columns ask for anything."""
    return (presence_B != 0) | (frequency_B != 0) | (repetition_B != 1)


def row_penalties(
    counts_BV: Int32[Array, "B V"],
    presence_B: Float[Array, " B"],
    frequency_B: Float[Array, " B"],
    repetition_B: Float[Array, " B"],
    *,
    num_positions: int,
) -> Penalties:
    """A request's penalties for each of its positions, R = B * num_positions; position j follows its first j drafts."""
    B = counts_BV.shape[0]
    return Penalties(
        counts_BV=counts_BV,
        request_R=jnp.repeat(jnp.arange(B, dtype=jnp.int32), num_positions),
        offset_R=jnp.tile(jnp.arange(num_positions, dtype=jnp.int32), B),
        presence_B=presence_B,
        frequency_B=frequency_B,
        repetition_B=repetition_B,
    )


def penalised(
    logits_RV: Float[Array, "R V"],
    penalties: Penalties,
    draft_token_ids_N: Int32[Array, " N"],
    cu_num_draft_tokens_B: Int32[Array, " B"],
) -> Float[Array, "R V"]:
    """The logits after their request's output, prompt and earlier drafts have cost each id what they do.

    Repetition first (a positive logit is divided, another multiplied), then frequency, then presence. What the two
    last arguments are is written at `api.reject`; a draft outside the vocabulary counts for nothing.
    """
    row_R = penalties.request_R
    counts_RV = _with_drafts(penalties, draft_token_ids_N, cu_num_draft_tokens_B)
    num_outputs_RV = counts_RV & (SEEN_IN_PROMPT - 1)
    repetition_R1 = penalties.repetition_B[row_R][:, None]
    repeated_RV = jnp.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    x_RV = jnp.where(counts_RV > 0, repeated_RV, logits_RV)
    x_RV = x_RV - penalties.frequency_B[row_R][:, None] * num_outputs_RV.astype(jnp.float32)
    return x_RV - penalties.presence_B[row_R][:, None] * (num_outputs_RV > 0).astype(jnp.float32)


def _with_drafts(penalties: Penalties, draft_token_ids_N, cu_num_draft_tokens_B) -> jax.Array:
    """counts_BV by row, and one more for each draft before the row's token."""
    num_drafts = draft_token_ids_N.shape[0]
    counts_RV = penalties.counts_BV[penalties.request_R]
    num_rows, whole_size = counts_RV.shape[0], shards.whole_size(counts_RV)
    if num_drafts == 0:
        return counts_RV
    start_B = jnp.concatenate([jnp.zeros((1,), jnp.int32), cu_num_draft_tokens_B[:-1]])
    start_R, rows_R = start_B[penalties.request_R], jnp.arange(num_rows, dtype=jnp.int32)

    def add(place: jax.Array, counts_RV: jax.Array) -> jax.Array:
        ids_R = draft_token_ids_N[jnp.clip(start_R + place, 0, num_drafts - 1)]
        is_counted_R = (place < penalties.offset_R) & (ids_R >= 0)
        own_R = shards.own_ids(jnp.where(is_counted_R, ids_R, whole_size), counts_RV)
        return counts_RV.at[rows_R, own_R].add(1, mode="drop")

    return lax.fori_loop(0, jnp.max(penalties.offset_R), add, counts_RV)
