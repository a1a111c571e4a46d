"""Device. Until a row has its minimum of tokens, EOS and stop ids have no probability."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def mask_stop_ids(
    logits_BJV: Float[Array, "B J V"], stop_ids_BW: Int[Array, "B W"], is_masked_BJ: Bool[Array, "B J"]
) -> Float[Array, "B J V"]:
    """Set the logits of a row's stop ids to -inf at the masked positions; stop_ids_BW holds -1 where there is none."""
    V = logits_BJV.shape[2]

    def mask(logits):
        id_BJW = jnp.where(is_masked_BJ[:, :, None] & (stop_ids_BW >= 0)[:, None, :], stop_ids_BW[:, None, :], V)
        row = jnp.arange(logits.shape[0])[:, None, None]
        position = jnp.arange(logits.shape[1])[None, :, None]
        return logits.at[row, position, id_BJW].set(-jnp.inf, mode="drop")

    return jax.lax.cond(jnp.any(is_masked_BJ), mask, lambda logits: logits, logits_BJV)
