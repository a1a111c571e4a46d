"""Device. The few entries of each row that a search or a draw looks at first: the blocks with the largest maxima.

Whoever looks there alone must know that nothing elsewhere matters: no other entry is above a row's floor. Where the
vocabulary is split, every shard has candidates of its own part, and the floor is that of all.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxspec import shards

_BLOCK = 64
_NUM_BLOCKS = 64  # covers any top-k up to this number


class Candidates(NamedTuple):
    """Entries of each row, block by block. What lies past a row's end is -inf."""

    x_RC: jax.Array  # f32
    ids_RC: jax.Array  # i32; those past the row's end, of -inf, are no ids, or another shard's
    floor_R: jax.Array  # f32, the most that any other entry is; -inf if there is none


def candidates(x_RV: Float[Array, "R V"]) -> Candidates:
    """The entries of the blocks with the largest maxima, of equal ones the first; none may be NaN."""
    num_rows, vocab_size = x_RV.shape
    num_blocks = -(-vocab_size // _BLOCK)
    if num_blocks <= _NUM_BLOCKS:
        ids_RC = jnp.broadcast_to(shards.ids_of(x_RV)[None], x_RV.shape)
        return Candidates(x_RV, ids_RC, jnp.full((num_rows,), -jnp.inf, jnp.float32))
    padding = num_blocks * _BLOCK - vocab_size
    blocks = jnp.pad(x_RV, ((0, 0), (0, padding)), constant_values=-jnp.inf).reshape(num_rows, num_blocks, _BLOCK)
    largest, block_ids = lax.top_k(blocks.max(axis=-1), _NUM_BLOCKS)
    ids = block_ids[:, :, None] * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)[None, None]
    return Candidates(
        jnp.take_along_axis(blocks, block_ids[:, :, None], axis=1).reshape(num_rows, _NUM_BLOCKS * _BLOCK),
        ids.reshape(num_rows, _NUM_BLOCKS * _BLOCK) + shards.first_id(x_RV),
        # NOTE: not largest[:, -1]: XLA's CPU backend would then sort all blocks in place of taking the top ones.
        shards.largest(largest.min(axis=-1)),
    )


def entries_at(x_RV: Float[Array, "R V"], ids_RC: Int32[Array, "R C"]) -> Float[Array, "R C"]:
    """Another array's entries at candidates' ids; what lies past a row's end is any of its entries."""
    return jnp.take_along_axis(x_RV, jnp.minimum(ids_RC - shards.first_id(x_RV), x_RV.shape[-1] - 1), axis=1)
