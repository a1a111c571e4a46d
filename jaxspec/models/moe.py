"""Device. Mixture of experts: a router chooses some experts for each token, and one ragged product runs them all.

Axes besides those of types.py: E experts, X experts a token, R token copies sorted by expert (N * X of them).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import shards
from jaxspec.config.model import MoeConfig
from jaxspec.models.layers import NORM_DTYPE, gated_mlp, mlp_specs
from jaxspec.types import ArraySpec


def moe_specs(hidden_size: int, moe: MoeConfig, dtype: Any) -> dict[str, Any]:
    """The router in float32 (it decides), the experts stacked, the shared experts as one gated MLP.

    Experts alone are [in, out], the one form that every platform's ragged product takes.
    """
    D, E, F = hidden_size, moe.num_experts, moe.intermediate_size
    tree: dict[str, Any] = {
        "router": ArraySpec((E, D), NORM_DTYPE, ("choice", "embed")),
        "experts_gate": ArraySpec((E, D, F), dtype, ("expert", "embed", "expert_ffn")),
        "experts_up": ArraySpec((E, D, F), dtype, ("expert", "embed", "expert_ffn")),
        "experts_down": ArraySpec((E, F, D), dtype, ("expert", "expert_ffn", "embed")),
    }
    if moe.has_correction_bias:
        tree["router_bias"] = ArraySpec((E,), NORM_DTYPE, ("choice",))
    if moe.shared_intermediate_size:
        tree["shared"] = mlp_specs(D, moe.shared_intermediate_size, dtype, with_bias=moe.shared_bias)
    return tree


def route(w: Mapping[str, Any], x_ND: jax.Array, moe: MoeConfig) -> tuple[jax.Array, jax.Array]:
    """(weight_NX f32, expert_NX i32): each token's experts, best first, and how much each counts.

    Source: Shazeer et al. 2017 for softmax; DeepSeek-V3's report, section 2.1.2, for groups and correction bias.
    """
    # Full precision wherever it runs: a rounded score picks another expert.
    logits_NE = jax.lax.dot_general(x_ND, w["router"], (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
    score_NE = jax.nn.softmax(logits_NE, axis=-1) if moe.score == "softmax" else jax.nn.sigmoid(logits_NE)
    choice_NE = score_NE + w["router_bias"][None, :] if moe.has_correction_bias else score_NE
    if moe.num_groups > 1:
        choice_NE = _within_best_groups(choice_NE, moe)
    _, expert_NX = jax.lax.top_k(choice_NE, moe.num_experts_per_token)
    weight_NX = jnp.take_along_axis(score_NE, expert_NX, axis=1)
    if moe.renormalize:
        weight_NX = weight_NX / jnp.maximum(jnp.sum(weight_NX, axis=1, keepdims=True), moe.min_weight_sum)
    return weight_NX * moe.scale, expert_NX


def _within_best_groups(choice_NE: jax.Array, moe: MoeConfig) -> jax.Array:
    """-inf outside the kept groups; a group is worth the sum of its two best experts."""
    N, groups = choice_NE.shape[0], moe.num_groups
    grouped = choice_NE.reshape(N, groups, moe.num_experts // groups)
    worth_Ng = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, kept_Nk = jax.lax.top_k(worth_Ng, moe.num_kept_groups)
    is_kept_Ng = jnp.any(kept_Nk[:, :, None] == jnp.arange(groups)[None, None, :], axis=1)
    return jnp.where(is_kept_Ng[:, :, None], grouped, -jnp.inf).reshape(choice_NE.shape)


def moe_mlp(w: Mapping[str, Any], x_ND: jax.Array, moe: MoeConfig) -> jax.Array:
    """The weighted sum of each token's experts, and the shared experts.

    NOTE: on CPU a ragged product is lowered to a dense one over all experts, and reorders the stack each pass.

    A token's result depends on no other token: every copy meets its own expert, and no expert has a capacity. A device
    that holds some of the experts, or a part of each, adds what they give to what the others' do.
    """
    N, X = x_ND.shape[0], moe.num_experts_per_token
    weight_NX, expert_NX = route(w, x_ND, moe)
    expert_R = expert_NX.reshape(N * X)
    num_own = w["experts_gate"].shape[0]
    if num_own < moe.num_experts:  # copies for a device's own experts come first, the others' fall behind the last
        own_R = expert_R - jax.lax.axis_index(shards.TENSOR) * num_own
        expert_R = jnp.where((own_R >= 0) & (own_R < num_own), own_R, num_own)
    order_R = jnp.argsort(expert_R, stable=True)
    sizes_E = jnp.zeros(num_own, jnp.int32).at[expert_R].add(1, mode="drop")
    x_RD = x_ND[order_R // X]

    def by_expert(x_Ri: jax.Array, weight_Eio: jax.Array) -> jax.Array:
        x_Ri = x_Ri.astype(weight_Eio.dtype)
        return jax.lax.ragged_dot(x_Ri, weight_Eio, sizes_E, preferred_element_type=jnp.float32)

    hidden_RF = jax.nn.silu(by_expert(x_RD, w["experts_gate"])) * by_expert(x_RD, w["experts_up"])
    out_RD = by_expert(hidden_RF, w["experts_down"])
    out_NXD = out_RD[jnp.argsort(order_R)].reshape(N, X, -1)
    if num_own < moe.num_experts:
        out_NXD = jnp.where(expert_R.reshape(N, X)[:, :, None] < num_own, out_NXD, 0.0)
    out_ND = shards.summed(jnp.sum(weight_NX[:, :, None] * out_NXD, axis=1))
    return out_ND + gated_mlp(w["shared"], x_ND) if moe.shared_intermediate_size else out_ND
