"""Device. Log-probabilities of emitted tokens, their ranks, and the likeliest tokens beside them."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxspec import shards
from jaxspec.types import TokenLogprobs

_BLOCK = 128


def no_logprobs(num_rows: int, num_positions: int, num_top: int) -> TokenLogprobs:
    """Zeros, in the shapes of `token_logprobs`."""
    place = (num_rows, num_positions)
    return TokenLogprobs(
        chosen_BJ=jnp.zeros(place, jnp.float32),
        rank_BJ=jnp.zeros(place, jnp.int32),
        top_ids_BJX=jnp.zeros((*place, num_top), jnp.int32),
        top_BJX=jnp.zeros((*place, num_top), jnp.float32),
    )


def token_logprobs(
    logits_BJV: Float[Array, "B J V"],
    token_ids_BJ: Int32[Array, "B J"],
    *,
    num_top: int,
    is_normalised: bool,
) -> TokenLogprobs:
    """The values at the tokens, with rank, and the num_top largest of each position.

    Args:
        token_ids_BJ: outside the vocabulary (-1): the values at such a place mean nothing.
        is_normalised: log-softmax of the logits; else the logits themselves.
    """
    V = shards.whole_size(logits_BJV)
    x_BJV = jnp.where(jnp.isnan(logits_BJV), -jnp.inf, logits_BJV)
    ids_BJ1 = jnp.clip(token_ids_BJ, 0, V - 1)[..., None]
    chosen_BJ1 = shards.entries(x_BJV, ids_BJ1)
    rank_BJ = 1 + shards.summed(jnp.sum((x_BJV > chosen_BJ1).astype(jnp.int32), axis=-1))
    top_BJX, top_ids_BJX = _largest(x_BJV, num_top)
    norm_BJ1 = jnp.zeros_like(chosen_BJ1)
    if is_normalised:
        peak_BJ1 = jnp.maximum(shards.largest(x_BJV.max(axis=-1, keepdims=True)), jnp.finfo(jnp.float32).min)
        norm_BJ1 = peak_BJ1 + jnp.log(shards.summed(jnp.exp(x_BJV - peak_BJ1).sum(axis=-1, keepdims=True)))
    return TokenLogprobs(
        chosen_BJ=(chosen_BJ1 - norm_BJ1)[..., 0], rank_BJ=rank_BJ, top_ids_BJX=top_ids_BJX, top_BJX=top_BJX - norm_BJ1
    )


def _largest(x_BJV: jax.Array, num_top: int) -> tuple[jax.Array, jax.Array]:
    """The largest entries of each position and their ids, the first of equals first.

    They lie in the blocks with the num_top largest maxima: one pass over the vocabulary, then a short row. Of a split
    vocabulary each shard finds its own, and the shards' are put side by side.
    """
    if shards.is_split(x_BJV):
        top_BJX, ids_BJX = _largest_here(x_BJV, min(num_top, x_BJV.shape[2]))
        top_BJX, ids_BJX = shards.side_by_side(top_BJX), shards.side_by_side(ids_BJX + shards.first_id(x_BJV))
        top_BJX, at_BJX = lax.top_k(top_BJX, num_top)
        return top_BJX, jnp.take_along_axis(ids_BJX, at_BJX, axis=-1)
    return _largest_here(x_BJV, num_top)


def _largest_here(x_BJV: jax.Array, num_top: int) -> tuple[jax.Array, jax.Array]:
    B, J, V = x_BJV.shape
    if num_top * _BLOCK * 2 > V:
        top_BJX, ids_BJX = lax.top_k(x_BJV, num_top)
        return top_BJX, ids_BJX
    num_blocks = -(-V // _BLOCK)
    padding = ((0, 0), (0, 0), (0, num_blocks * _BLOCK - V))
    blocks = jnp.pad(x_BJV, padding, constant_values=-jnp.inf).reshape(B, J, num_blocks, _BLOCK)
    _, block_ids = lax.top_k(blocks.max(axis=-1), num_top)
    block_ids = jnp.sort(block_ids, axis=-1)  # in the vocabulary's order, so that ties resolve by id
    short = jnp.take_along_axis(blocks, block_ids[..., None], axis=2).reshape(B, J, num_top * _BLOCK)
    ids = (block_ids[..., None] * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)[None, None, None]).reshape(
        B, J, num_top * _BLOCK
    )
    top_BJX, at_BJX = lax.top_k(short, num_top)
    return top_BJX, jnp.take_along_axis(ids, at_BJX, axis=-1)
