"""Device. From raw logits to the distribution a row is sampled from, and a draw from it."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32

from jaxspec.pallas_kernels.rejection.argmax import row_argmax, row_gumbel_argmax
from jaxspec.pallas_kernels.rejection.cutoff import row_cutoffs, row_filters, scaled_logits
from jaxspec.pallas_kernels.rejection.penalties import penalised, row_penalties
from jaxspec.types import SamplingTable


def process(logits_BJV: Float[Array, "B J V"], table: SamplingTable) -> Float[Array, "B J V"]:
    """The logits whose softmax a sampled row's tokens are drawn from; removed tokens are -inf.

    Temperature, then min-p, top-k and top-p, in this order. Greedy rows pass unchanged. NaN counts as -inf.
    """
    B, J, V = logits_BJV.shape
    is_sampled_B = table.temperature_B > 0

    def sampled():
        logits_RV = logits_BJV.reshape(B * J, V)
        filters = row_filters(table.temperature_B, table.top_k_B, table.top_p_B, table.min_p_B, num_positions=J)
        cutoff_R = row_cutoffs(logits_RV, *filters)
        x_RV = scaled_logits(logits_RV, filters.temperature_R)
        x_BJV = jnp.where(x_RV >= cutoff_R[:, None], x_RV, -jnp.inf).reshape(B, J, V)
        return jnp.where(is_sampled_B[:, None, None], x_BJV, logits_BJV)

    return lax.cond(jnp.any(is_sampled_B), sampled, lambda: logits_BJV)


def penalise(
    logits_BV: Float[Array, "B V"],
    table: SamplingTable,
    counts_BV: Int32[Array, "B V"],
    draft_ids_BK: Int32[Array, "B K"],
    place: Int32[Array, ""],
) -> Float[Array, "B V"]:
    """The logits of one position after the rows' penalties; its `place` says how many drafts, -1 = none, count too."""
    B, K = draft_ids_BK.shape
    penalties = row_penalties(counts_BV, table.presence_B, table.frequency_B, table.repetition_B, num_positions=1)
    penalties = penalties._replace(offset_R=jnp.broadcast_to(place, (B,)))
    ends_B = jnp.arange(1, B + 1, dtype=jnp.int32) * K
    return penalised(logits_BV, penalties, draft_ids_BK.reshape(-1), ends_B)


def draw(logits_BV: Float[Array, "B V"], key_B2: UInt32[Array, "B 2"], table: SamplingTable) -> Int32[Array, " B"]:
    """A token a row from processed logits: the arg-max in greedy rows, a draw under the row's key in the others."""
    is_sampled_B = table.temperature_B > 0
    return lax.cond(
        jnp.any(is_sampled_B),
        lambda: row_gumbel_argmax(logits_BV, key_B2, is_noised_R=is_sampled_B),
        lambda: row_argmax(logits_BV),
    )
