"""Device. The logit below which min-p, top-k and top-p remove a token: one number a row, found without a sort.

All three filters keep a row's largest entries, so their composition (temperature first, then min-p, top-k, top-p, each
over what the one before left) is a single cutoff: x survives if x >= cutoff. Ties at the cutoff all survive.

A cutoff is the largest x whose weight above it is still below a limit, when one more would reach it: the number of
larger entries below k, or their probability below p. It is bisected over the floats' own order (at most 32 halvings),
in the few blocks that hold a row's largest entries; a row whose cutoff lies below those (a flat distribution, a
top-k beyond them) is searched whole, and only that row.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxspec import shards
from jaxspec.pallas_kernels.rejection.candidates import Candidates, candidates

_Weigh = Callable[[jax.Array, slice | jax.Array], jax.Array]  # entries and the rows they are of -> their weights

# NOTE: of a row's cutoff, relative to its largest entry: four units in the last place. XLA's CPU backend divides a
# whole row by multiplying with 1 / temperature, and a lone entry by dividing; a cutoff found in the one would remove
# the entry that it is, seen in the other.
_SLACK = 2.0**-21


class RowFilters(NamedTuple):
    """What shapes each row's distribution, in the order of `row_cutoffs`' arguments; neutral in greedy rows."""

    temperature_R: jax.Array  # f32 > 0
    top_k_R: jax.Array  # i32
    top_p_R: jax.Array  # f32
    min_p_R: jax.Array  # f32


def row_filters(
    temperature_B: Float[Array, " B"],
    top_k_B: Int32[Array, " B"],
    top_p_B: Float[Array, " B"],
    min_p_B: Float[Array, " B"],
    *,
    num_positions: int,
) -> RowFilters:
    """A request's filters for each of its positions, R = B * num_positions; temperature 0 is a greedy request."""
    is_greedy_B = temperature_B == 0

    def per_position(values_B: jax.Array, neutral: float) -> jax.Array:
        values_B = jnp.where(is_greedy_B, jnp.asarray(neutral, values_B.dtype), values_B)
        return jnp.repeat(values_B, num_positions)

    return RowFilters(
        per_position(temperature_B, 1), per_position(top_k_B, 0), per_position(top_p_B, 1), per_position(min_p_B, 0)
    )


def scaled_logits(logits_RV: jax.Array, temperature_R: jax.Array) -> jax.Array:
    """logits / temperature, with NaN as -inf and +inf as the largest float, so that no later step meets either."""
    x = logits_RV / temperature_R[:, None]
    return jnp.where(jnp.isnan(x), -jnp.inf, jnp.minimum(x, jnp.finfo(jnp.float32).max))


def row_cutoffs(
    logits_RV: Float[Array, "R V"],
    temperature_R: Float[Array, " R"],
    top_k_R: Int32[Array, " R"],
    top_p_R: Float[Array, " R"],
    min_p_R: Float[Array, " R"],
) -> Float[Array, " R"]:
    """What `scaled_logits` must reach to survive each row's filters.

    Args:
        temperature_R: > 0.
        top_k_R: <= 0 = off; top_p_R: >= 1 = off; min_p_R: <= 0 = off.
    Returns: f32, never above the row's largest entry; -inf where no filter is on.
    """

    def search() -> jax.Array:
        # One array for all that looks at it: see `_SLACK`.
        x_RV = lax.optimization_barrier(scaled_logits(logits_RV, temperature_R))
        return cutoffs_among(x_RV, candidates(x_RV), top_k_R, top_p_R, min_p_R)

    off_R = jnp.full(temperature_R.shape, -jnp.inf, jnp.float32)
    return lax.cond(jnp.any(is_filtered(top_k_R, top_p_R, min_p_R)), search, lambda: off_R)


def is_filtered(top_k_R: jax.Array, top_p_R: jax.Array, min_p_R: jax.Array) -> jax.Array:
    """bool, whether a row has a filter at all."""
    return (top_k_R > 0) | (top_p_R < 1) | (min_p_R > 0)


def cutoffs_among(
    x_RV: Float[Array, "R V"],
    found: Candidates,
    top_k_R: Int32[Array, " R"],
    top_p_R: Float[Array, " R"],
    min_p_R: Float[Array, " R"],
) -> Float[Array, " R"]:
    """`row_cutoffs` of logits that are scaled, and whose candidates are known."""
    has_k_R = (top_k_R > 0) & (top_k_R < shards.whole_size(x_RV))
    has_p_R = top_p_R < 1
    peak_R = shards.largest(found.x_RC.max(axis=-1))
    off_R = jnp.full_like(peak_R, -jnp.inf)

    def search(weigh: _Weigh, limit_R: jax.Array, is_on_R: jax.Array, least_R: jax.Array) -> jax.Array:
        """least_R: the cutoff lies above it."""
        lowest, low_R, high_R = _ordered(jnp.float32(-jnp.inf)), _ordered(found.floor_R), _ordered(peak_R)
        start_R = jnp.where(is_on_R, jnp.maximum(low_R - 1, lowest), high_R)
        key_R = _bisect(found.x_RC, weigh(found.x_RC, slice(None)), limit_R, start_R, high_R)

        def whole_row(row: jax.Array, key_R: jax.Array) -> jax.Array:
            rows = row[None]
            x_1V = x_RV[rows]
            least_1 = jnp.minimum(_ordered(least_R[rows]), key_R[rows])
            return key_R.at[rows].set(_bisect(x_1V, weigh(x_1V, rows), limit_R[rows], least_1, key_R[rows]))

        def open_row(row: jax.Array, key_R: jax.Array) -> jax.Array:
            return lax.cond(key_R[row] < low_R[row], whole_row, lambda _, key_R: key_R, row, key_R)

        def open_rows() -> jax.Array:
            return lax.fori_loop(0, key_R.shape[0], open_row, key_R)

        key_R = lax.cond(jnp.any(key_R < low_R), open_rows, lambda: key_R)
        return jnp.where(is_on_R, _unordered(key_R), -jnp.inf)

    def top_k() -> jax.Array:
        return search(lambda x, rows: jnp.ones_like(x), top_k_R.astype(jnp.float32), has_k_R, off_R)

    def top_p(cutoff_R: jax.Array) -> jax.Array:
        def mass(x: jax.Array, rows: slice | jax.Array) -> jax.Array:
            return jnp.where(x >= cutoff_R[rows, None], jnp.exp(x - peak_R[rows, None]), jnp.float32(0))

        mass_R = shards.summed(mass(x_RV, slice(None)).sum(axis=-1))
        # What is removed weighs no less than (1 - p) of it, and is no more than V entries; half, for rounding.
        least_R = peak_R + jnp.log((1 - top_p_R) * mass_R / (2 * shards.whole_size(x_RV)))
        return search(mass, top_p_R * mass_R, has_p_R, jnp.where(has_p_R, least_R, off_R))

    cutoff_R = jnp.where(min_p_R > 0, jnp.minimum(peak_R + jnp.log(min_p_R), peak_R), off_R)
    cutoff_R = jnp.maximum(cutoff_R, lax.cond(jnp.any(has_k_R), top_k, lambda: off_R))
    cutoff_R = jnp.maximum(cutoff_R, lax.cond(jnp.any(has_p_R), lambda: top_p(cutoff_R), lambda: off_R))
    return jnp.where(cutoff_R > -jnp.inf, cutoff_R - jnp.maximum(jnp.abs(peak_R), jnp.abs(cutoff_R)) * _SLACK, -jnp.inf)


def _bisect(x_RC, weight_RC, limit_R: jax.Array, low_R: jax.Array, high_R: jax.Array) -> jax.Array:
    """The smallest key in low..high (high, if none) such that the entries above it weigh less than the limit."""

    def halve(state):
        low_R, high_R = state
        middle_R = (low_R & high_R) + ((low_R ^ high_R) >> 1)  # the floor of their mean, without overflow
        weight_R = jnp.sum(jnp.where(x_RC > _unordered(middle_R)[:, None], weight_RC, jnp.float32(0)), axis=-1)
        is_enough_R = shards.summed(weight_R) < limit_R
        return jnp.where(is_enough_R, low_R, middle_R + 1), jnp.where(is_enough_R, middle_R, high_R)

    _, found_R = lax.while_loop(lambda state: jnp.any(state[0] < state[1]), halve, (low_R, high_R))
    return found_R


def _ordered(x: jax.Array) -> jax.Array:
    """int32 keys in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _unordered(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ jnp.int32(0x7FFFFFFF), key), jnp.float32)
