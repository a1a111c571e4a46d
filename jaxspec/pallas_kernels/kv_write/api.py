"""Device. Writes the keys and values of new tokens into their slots of a page pool, in place under donation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8, Num

MAX_INT8 = 127  # -128 is left out, so that the range is symmetric


def kv_write(
    pool_PGSH: Num[Array, "P heads S *H"], kv_NGH: Num[Array, "N heads *H"], slots_N: Int[Array, " N"]
) -> Num[Array, "P heads S *H"]:
    """Write one entry a token; a negative slot writes nothing.

    Args:
        pool_PGSH: the page pool; keys are heads [0, G), values heads [G, 2G), or one head is a latent. Without the
            last axis: a number a slot and head, such as the scales of integers.
        kv_NGH: the new entries, cast to the pool's dtype; where that is uint16, they become the bits of bfloat16s.
        slots_N: i32, page * S + offset within the page, or negative to drop the entry.

    Returns:
        The pool, the same shape and dtype.
    """
    if pool_PGSH.dtype == jnp.uint16:
        kv_NGH = jax.lax.bitcast_convert_type(kv_NGH.astype(jnp.bfloat16), jnp.uint16)
    num_pages, num_heads, page_size = pool_PGSH.shape[:3]
    if num_heads * slots_N.shape[0] == 1:
        kv_NGH = jnp.pad(kv_NGH, ((0, 1), *[(0, 0)] * (kv_NGH.ndim - 1)))
        slots_N = jnp.pad(slots_N, (0, 1), constant_values=-1)
    # Negative indices would wrap to the last page, so they are sent past the end, where mode="drop" ignores them.
    page_N1 = jnp.where(slots_N < 0, num_pages, slots_N // page_size)[:, None]
    head_1G = jnp.arange(num_heads, dtype=jnp.int32)[None, :]
    offset_N1 = (slots_N % page_size)[:, None]
    # NOTE: one entry for each head and never a scatter of a single one (see the padding above), which XLA would turn
    # into a guarded slice update; CPU copies the whole pool for that.
    return pool_PGSH.at[page_N1, head_1G, offset_N1].set(kv_NGH.astype(pool_PGSH.dtype), mode="drop")


def round_entries(kv_NGH: Float[Array, "N heads H"]) -> tuple[Int8[Array, "N heads H"], Float[Array, "N heads"]]:
    """(values, scale f32): each head's largest magnitude becomes 127, a head of zeros has scale 1."""
    kv_NGH = kv_NGH.astype(jnp.float32)
    largest_NG = jnp.max(jnp.abs(kv_NGH), axis=-1)
    scale_NG = jnp.where(largest_NG > 0, largest_NG / MAX_INT8, 1.0)
    values_NGH = jnp.clip(jnp.round(kv_NGH / scale_NG[..., None]), -MAX_INT8, MAX_INT8)
    return values_NGH.astype(jnp.int8), scale_NG
