"""Device. Attention over the page pool: one way in for full, sliding-window and latent caches, and the grouped-query
block most families share."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache.pages import write_entries
from jaxspec.config.model import ModelConfig
from jaxspec.models.base import Place as Place
from jaxspec.models.chains import attend_block, attend_chains
from jaxspec.models.layers import NORM_DTYPE, joining, linear, rms_norm
from jaxspec.models.rope import apply_rope
from jaxspec.pallas_kernels.paged_attention import paged_attention
from jaxspec.types import ArraySpec, BlockPool, ChainPool, Int8Pool, OpenPool, Pool


def attend(
    q_BTQH: jax.Array,
    entries_BTGH: jax.Array,
    pool: Pool | OpenPool,
    place: Place,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    value_size: int | None = None,
) -> tuple[jax.Array, Any]:
    """Write the tokens' cache entries into their slots, then let every query see its row's.

    Args:
        q_BTQH: queries, turned.
        entries_BTGH: what the cache keeps of each token: keys, then values (twice the key heads); or, where value_size
            is given, keys alone, whose first value_size features are the values.
        pool: [L*P, entries, S, H].
        place: the tokens and the layer's pages.
        scale, window, softcap, value_size: as `paged_attention` takes them.

    Returns:
        f32[B, T, Q, H or value_size], and the pool, of the kind that it was.
    """
    if isinstance(pool, ChainPool):
        return attend_chains(
            q_BTQH, entries_BTGH, pool, place, scale=scale, window=window, softcap=softcap, value_size=value_size
        )
    if isinstance(pool, BlockPool):
        return attend_block(
            q_BTQH, entries_BTGH, pool, place, scale=scale, window=window, softcap=softcap, value_size=value_size
        )
    B, T, entries, H = entries_BTGH.shape
    tokens = place.tokens
    slot_offset = place.page_offset * pool.shape[2]
    slots_N = jnp.where(tokens.slots_BT < 0, -1, tokens.slots_BT + slot_offset).reshape(B * T)
    pool = write_entries(pool, entries_BTGH.reshape(B * T, entries, H), slots_N)
    pages_BM = jnp.where(tokens.pages_BM < 0, -1, tokens.pages_BM + place.page_offset)
    values_PGSH, scale_PGS = (pool.values_PGSH, pool.scale_PGS) if isinstance(pool, Int8Pool) else (pool, None)
    out = paged_attention(
        q_BTQH,
        values_PGSH,
        pages_BM,
        tokens.positions_BT,
        scale=scale,
        window=window,
        softcap=softcap,
        value_size=value_size,
        scale_PGS=scale_PGS,
    )
    return out, pool


def attention_specs(config: ModelConfig, dtype: Any) -> dict[str, ArraySpec]:
    """Grouped-query attention; q, k and v are fused along out."""
    D, Q, G, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    parts = (("heads", Q * H), ("kv_heads", G * H), ("kv_heads", G * H))
    tree = {
        "qkv": ArraySpec(((Q + 2 * G) * H, D), dtype, ("heads", "embed"), parts=parts),
        "o": ArraySpec((D, Q * H), dtype, ("embed", "heads")),
    }
    if config.qkv_bias:
        tree["qkv_bias"] = ArraySpec(((Q + 2 * G) * H,), dtype, ("heads",), parts=parts)
    if config.o_bias:
        tree["o_bias"] = ArraySpec((D,), dtype, ("embed",))
    if config.qk_norm:
        tree["q_norm"] = ArraySpec((H,), NORM_DTYPE, ("head_dim",), 0.0)
        tree["k_norm"] = ArraySpec((H,), NORM_DTYPE, ("head_dim",), 0.0)
    return tree


def self_attention(
    w: Mapping[str, jax.Array],
    x_ND: jax.Array,
    pool: Pool,
    place: Place,
    config: ModelConfig,
    *,
    window: int | None,
    layer_scale: float = 1.0,
) -> tuple[jax.Array, Pool]:
    """Grouped-query attention of normed tokens: (out_ND, pool). layer_scale: times the config's scale of scores.

    A layer with a "gate" weighs each feature of its heads by a sigmoid before they are joined. Heads are those that the
    weights have: a device's own, where they are split.
    """
    H = config.head_dim
    Q = w["o"].shape[1] // H
    G = (w["qkv"].shape[0] // H - Q) // 2
    B, T = place.tokens.token_ids_BT.shape
    qkv = linear(x_ND, w["qkv"], w.get("qkv_bias"))
    q, k, v = jnp.split(qkv.reshape(B, T, Q + 2 * G, H), [Q, Q + G], axis=2)
    if config.qk_norm:
        q, k = rms_norm(q, w["q_norm"], config.norm_eps), rms_norm(k, w["k_norm"], config.norm_eps)
    if place.rotation is not None:
        q, k = apply_rope(q, place.rotation), apply_rope(k, place.rotation)
    out, pool = attend(
        q,
        jnp.concatenate([k, v], axis=2),
        pool,
        place,
        scale=layer_scale * (H**-0.5 if config.attention_scale is None else config.attention_scale),
        window=window,
        softcap=config.attention_softcap,
    )
    out_NH = out.reshape(B * T, Q * H)
    if "gate" in w:
        out_NH = out_NH * jax.nn.sigmoid(linear(x_ND, w["gate"]))
    return joining(out_NH, w["o"], w.get("o_bias")), pool
