"""Device. The page pool of one cache: how its pages are laid out, and where in it a position lies."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config.model import ModelConfig
from jaxspec.pallas_kernels.kv_write import kv_write, round_entries
from jaxspec.types import Int8Pool, Pool

PADDING_SLOT_ID = -1


def pool_shape(
    config: ModelConfig, num_pages: int, block_size: int, *, num_heads: int | None = None
) -> tuple[int, int, int, int]:
    """[L*P, 2G, S, H]: one array for all layers, so that a loop over layers never slices or copies it.

    Keys are heads [0, G), values [G, 2G). A latent cache has one entry a token that is key and value, of the latent's
    size. A head's slots lie together: a page is ready to be multiplied as it stands.

    num_heads: entries a token, where devices hold others than the model's (`distributed.Split.cache_heads`); then each
    device's own are keys and values one behind the other.
    """
    heads, size = config.cache_heads
    return config.num_layers * num_pages, num_heads or heads, block_size, size


def new_pool(shape: tuple[int, int, int, int], dtype: Any) -> Pool:
    """A pool of zeros. dtype: "int8" for integers with a scale a slot and head, "uint16" for bfloat16s kept as their
    bits, else a float's."""
    if dtype == "int8":
        return Int8Pool(values_PGSH=jnp.zeros(shape, jnp.int8), scale_PGS=jnp.zeros(shape[:3], jnp.float32))
    return jnp.zeros(shape, dtype)


def write_entries(pool: Pool, entries_NGH: jax.Array, slots_N: jax.Array) -> Pool:
    """The pool with one more entry a token, as `kv_write`; integers are rounded from the entry alone, head by head."""
    if not isinstance(pool, Int8Pool):
        return kv_write(pool, entries_NGH, slots_N)
    values_NGH, scale_NG = round_entries(entries_NGH)
    return Int8Pool(
        values_PGSH=kv_write(pool.values_PGSH, values_NGH, slots_N),
        scale_PGS=kv_write(pool.scale_PGS, scale_NG, slots_N),
    )


def slots_of(positions_BT: jax.Array, pages_BM: jax.Array, block_size: int) -> jax.Array:
    """The slot of each position, i32[B, T]: page * S + offset; PADDING_SLOT_ID for a negative position or one whose
    page the row does not hold."""
    index_BT = positions_BT // block_size
    inside_BT = (positions_BT >= 0) & (index_BT < pages_BM.shape[1])
    page_BT = jnp.take_along_axis(pages_BM, jnp.where(inside_BT, index_BT, 0), axis=1)
    slot_BT = page_BT * block_size + positions_BT % block_size
    return jnp.where(inside_BT & (page_BT >= 0), slot_BT, PADDING_SLOT_ID)
