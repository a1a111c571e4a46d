"""Device. Writes the keys and values of new tokens into their slots of a page pool, in place under donation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def kv_write(
    pool_PSGH: Float[Array, "P S G2 H"], kv_NGH: Float[Array, "N G2 H"], slots_N: Int[Array, "N"]
) -> Float[Array, "P S G2 H"]:
    """Write one entry a token; a negative slot writes nothing.

    Args:
        pool_PSGH: the page pool; keys are heads [0, G), values heads [G, 2G).
        kv_NGH: the new entries, cast to the pool's dtype.
        slots_N: i32, page * S + offset within the page, or negative to drop the entry.

    Returns:
        The pool, the same shape and dtype.
    """
    pages, page_size, heads, size = pool_PSGH.shape
    num_slots = pages * page_size
    # Negative indices would wrap to the last slot, so they are sent past the end, where mode="drop" ignores them.
    index_N = jnp.where(slots_N < 0, num_slots, slots_N)
    if index_N.shape[0] == 1:
        # XLA turns a scatter of one entry into a guarded slice update, for which CPU copies the whole pool.
        index_N = jnp.pad(index_N, (0, 1), constant_values=num_slots)
        kv_NGH = jnp.pad(kv_NGH, ((0, 1), (0, 0), (0, 0)))
    flat = pool_PSGH.reshape(num_slots, heads, size)
    flat = flat.at[index_N].set(kv_NGH.astype(pool_PSGH.dtype), mode="drop")
    return jax.lax.reshape(flat, pool_PSGH.shape)
