"""Device. Block verification's scalars: how likely each draft's prefix is to stand, given what the vocabulary sums to.

Source: Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR 2025, algorithm 2. With p_0 = 1,
p_i = min(p_(i-1) * target(x_i) / draft(x_i), 1); the prefix of i drafts stands with h_i; the longest that stands is
kept, and the token after it drawn from max(p_i * target - draft, 0). All work in the dtype they are given.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec import shards


def joint_log_ratios(
    log_ratio_N: jax.Array, is_first_N: jax.Array, max_drafts: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """log p before and after each flattened draft.

    Args:
        log_ratio_N: log(target(x) / draft(x)) of the draft; -inf for one that can not stand, never NaN or +inf.
        is_first_N: bool, whether the draft is its request's first.
        max_drafts: at least the longest segment.
    """

    def before(after_N: jax.Array) -> jax.Array:
        return jnp.where(is_first_N, jnp.zeros_like(after_N), jnp.roll(after_N, 1))

    # After i turns the first i places of every segment are what a walk along it gives, to the last bit.
    after_N = lax.fori_loop(
        0,
        max_drafts,
        lambda _, after_N: jnp.minimum(before(after_N) + log_ratio_N, jnp.zeros_like(after_N)),
        jnp.zeros_like(log_ratio_N),
    )
    return before(after_N), after_N


def residual_masses(logprob_target_NV: jax.Array, logprob_draft_NV: jax.Array, log_joint_N: jax.Array) -> jax.Array:
    """Sum of max(p * target - draft, 0) over the vocabulary; log_joint_N: log p before each draft. NaN adds nothing."""
    excess_NV = jnp.exp(logprob_target_NV + log_joint_N[:, None]) - jnp.exp(logprob_draft_NV)
    return shards.summed(jnp.where(excess_NV > 0, excess_NV, jnp.zeros_like(excess_NV)).sum(axis=-1))


def point_mass_residual_masses(logprob_target_N: jax.Array, log_joint_N: jax.Array) -> jax.Array:
    """The same where the draft was certain: all of the target but the draft, whose log-probability is given."""
    mass_N = jnp.exp(log_joint_N) * -jnp.expm1(logprob_target_N)
    return jnp.where(mass_N > 0, mass_N, jnp.zeros_like(mass_N))


def thresholds(log_joint_N: jax.Array, residual_mass_N: jax.Array, is_last_N: jax.Array) -> jax.Array:
    """h: the prefix that ends in draft n stands if its uniform is at most h_n.

    Args:
        log_joint_N: log p after draft n.
        residual_mass_N: sum of max(p * target - draft, 0) over the vocabulary at draft n, with p from before it.
        is_last_N: bool, whether no draft that could stand follows.
    """
    mass_N = jnp.roll(residual_mass_N, -1)
    total_N = mass_N - jnp.expm1(log_joint_N)
    # Nothing lost and nothing left to draw: the prefix stands.
    inner_N = jnp.where(total_N > 0, mass_N / total_N, jnp.ones_like(total_N))
    return jnp.where(is_last_N, jnp.exp(log_joint_N), inner_N)
