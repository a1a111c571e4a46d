"""Device. Rotary embedding: frequencies of every kind, tables for one pass, and the turn itself."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.model import RopeConfig

Rotation = tuple[jax.Array, jax.Array]  # cos and sin, f32[B, T, 1, pairs]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies f32[pairs]; a head's first 2 * pairs features turn.

    Source: Su et al. 2021; "llama3" is the wavelength rule of Llama 3.1's release; Peng et al. 2023 for YaRN.
    """
    if rope.kind == "proportional":
        num_turning = int(rope.partial_factor * head_dim // 2)
        inv = rope.theta ** (-2.0 * np.arange(num_turning) / head_dim)
        return (np.pad(inv, (0, head_dim // 2 - num_turning)) / rope.factor).astype(np.float32)
    dim = int(head_dim * rope.partial_factor)
    inv = rope.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
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
    elif rope.kind == "yarn":
        stretched = _yarn_ramp(rope, dim)
        inv = inv / rope.factor * stretched + inv * (1 - stretched)
    return inv.astype(np.float32)


def _yarn_ramp(rope: RopeConfig, dim: int) -> np.ndarray:
    """How far each frequency is stretched: 0 where it turns often within the original length, 1 where seldom."""

    def frequency_with(turns: float) -> float:
        return (
            dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = frequency_with(rope.beta_fast), frequency_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, and no division by zero
    return np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)


def rope_tables(positions_BT: jax.Array, rope: RopeConfig, head_dim: int) -> Rotation:
    """cos and sin of one pass, to be shared by all layers and heads."""
    frequencies = jnp.asarray(rope_frequencies(rope, head_dim))
    angle = positions_BT.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return (cos, sin) if rope.attention_factor == 1.0 else (cos * rope.attention_factor, sin * rope.attention_factor)


def apply_rope(x_BTQH: jax.Array, rotation: Rotation) -> jax.Array:
    """Turn pairs (j, j + pairs), the half-split convention; features past the pairs stay as they are."""
    cos, sin = rotation
    pairs = cos.shape[-1]
    first, second, rest = jnp.split(x_BTQH, [pairs, 2 * pairs], axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned if rest.shape[-1] == 0 else [*turned, rest], axis=-1)
