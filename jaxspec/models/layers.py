"""Device. The layers that families share: norms, linear maps, rotary embedding."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.model import RopeConfig
from jaxspec.types import Int8Weight


def rms_norm(x_ND: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32. Source: Zhang & Sennrich 2019, eq. 4."""
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x_ND), axis=-1, keepdims=True) + eps)
    return x_ND * scale * weight_D.reshape((1,) * (x_ND.ndim - 1) + weight_D.shape)


def linear(x_Ni: jax.Array, weight_oi: jax.Array | Int8Weight, bias_o: jax.Array | None = None) -> jax.Array:
    """x @ weight.T (+ bias) with float32 accumulation and result; x is rounded to the weight's dtype.

    The weight stands on the left: a tenth to a third faster on CPU, and no matter elsewhere (docs/log.md).
    An int8 weight's scales are applied to the sums, since they are constant along the axis summed over.
    """
    if isinstance(weight_oi, Int8Weight):
        out_No = linear(x_Ni, weight_oi.values_oi.astype(weight_oi.dtype)) * weight_oi.scale_o[None, :]
        return out_No if bias_o is None else out_No + bias_o.astype(jnp.float32)[None, :]
    rows = x_Ni.shape[0]
    x_Ni = x_Ni.astype(weight_oi.dtype)
    is_lone = rows == 1 and weight_oi.dtype == jnp.bfloat16
    if is_lone:
        # One bfloat16 row would take a path that converts the weights, ten times slower than two rows on CPU. The
        # barriers keep the compiler from seeing that one row is enough.
        x_Ni = jax.lax.optimization_barrier(jnp.pad(x_Ni, ((0, 1), (0, 0))))
    out_oN = jax.lax.dot_general(weight_oi, x_Ni, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if is_lone:
        out_oN = jax.lax.optimization_barrier(out_oN)
    out_No = out_oN.T[:rows]
    return out_No if bias_o is None else out_No + bias_o.astype(jnp.float32)[None, :]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies f32[head_dim / 2], scaled by the config's rule.

    Source: Su et al. 2021; "llama3" is the wavelength rule of Llama 3.1's release.
    """
    inv = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.divisors is not None:
        inv = inv / np.asarray(rope.divisors, np.float64)
    if rope.kind == "linear":
        inv = inv / rope.factor
    elif rope.kind == "llama3":
        wavelength = 2 * math.pi / inv
        original = rope.original_max_position_embeddings
        smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        inv = (1 - smooth) * inv / rope.factor + smooth * inv
    return inv.astype(np.float32)


def rope_tables(positions_BT: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """cos and sin, f32[B, T, 1, H/2], to be shared by all layers and heads."""
    angle = positions_BT.astype(jnp.float32)[:, :, None, None] * jnp.asarray(frequencies)[None, None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x_BTQH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate pairs (j, j + H/2), the half-split convention."""
    first, second = jnp.split(x_BTQH, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
