"""Device. DeepSeek-V3: latent attention in its absorbed form over a cache of latents, experts chosen by group.

Axes besides those of types.py: A a query's latent, C the cached latent, X and Y a head's features without and with
rotation, U those of a value.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.model import MlaConfig, ModelConfig
from jaxspec.models import names
from jaxspec.models.attention import Place, attend
from jaxspec.models.base import Family, Weights
from jaxspec.models.decoder import (
    Layer,
    decoder_forward,
    feed_forward_specs,
    head_logits,
    norm_specs,
    pre_norm_layer,
    with_ends,
)
from jaxspec.models.layers import NORM_DTYPE, joining, linear, rms_norm
from jaxspec.models.rope import apply_rope
from jaxspec.types import ArraySpec, Pool
from jaxspec.weights.names import NameTable, TensorSource
from jaxspec.weights.transforms import HeadRows

_LATENT_EPS = 1e-6  # of the norms inside attention, whatever the config says of the others


def specs(config: ModelConfig, dtype: Any) -> Weights:
    """kv_b is kept as its two halves, each [heads, out, in]: k_up brings queries into the latent, v_up values out."""
    mla, D, Q = _mla(config), config.hidden_size, config.num_heads
    C, X, Y = mla.kv_lora_rank, mla.nope_head_dim, mla.rope_head_dim
    attention = {
        "kv_a": ArraySpec((C + Y, D), dtype, ("latent", "embed")),
        "kv_a_norm": ArraySpec((C,), NORM_DTYPE, ("latent",), 0.0),
        "k_up": ArraySpec((Q, C, X), dtype, ("heads", "latent", "head_dim")),
        "v_up": ArraySpec((Q, mla.v_head_dim, C), dtype, ("heads", "head_dim", "latent")),
        "o": ArraySpec((D, Q * mla.v_head_dim), dtype, ("embed", "heads")),
    }
    A = mla.q_lora_rank
    if A is None:
        attention["q"] = ArraySpec((Q * (X + Y), D), dtype, ("heads", "embed"))
    else:
        attention["q_a"] = ArraySpec((A, D), dtype, ("latent", "embed"))
        attention["q_a_norm"] = ArraySpec((A,), NORM_DTYPE, ("latent",), 0.0)
        attention["q_b"] = ArraySpec((Q * (X + Y), A), dtype, ("heads", "latent"))
    if config.qkv_bias:
        attention["kv_a_bias"] = ArraySpec((C + Y,), dtype, ("latent",))
        if A is not None:
            attention["q_a_bias"] = ArraySpec((A,), dtype, ("latent",))
    if config.o_bias:
        attention["o_bias"] = ArraySpec((D,), dtype, ("embed",))
    norms = norm_specs(config, "attention_norm", "mlp_norm")
    layers = [norms | attention | feed_forward_specs(config, i, dtype) for i in range(config.num_layers)]
    return with_ends(config, dtype, layers)


def _mla(config: ModelConfig) -> MlaConfig:
    assert config.mla is not None
    return config.mla


def latent_layer(config: ModelConfig) -> Layer:
    """Latent attention, then the MLP, each on a normed state and added to it."""
    return pre_norm_layer(config, None, latent_attention)


def latent_attention(w, x_ND: jax.Array, pool: Pool, place: Place, config: ModelConfig, *, window: int | None = None):
    """Attention of normed tokens, (out_ND, pool): queries are brought into the latent space, so that the cache is read
    as it lies and never expanded into heads.

    Source: DeepSeek-V2's report, section 2.1 and appendix C, in the absorbed order of products.
    """
    assert place.rotation is not None
    assert window is None, "no config of this family has windows"
    mla, Q = _mla(config), w["k_up"].shape[0]  # a device's own heads, where they are split
    C, X, Y = mla.kv_lora_rank, mla.nope_head_dim, mla.rope_head_dim
    B, T = place.tokens.token_ids_BT.shape
    if mla.q_lora_rank is None:
        q = linear(x_ND, w["q"])
    else:
        q = linear(rms_norm(linear(x_ND, w["q_a"], w.get("q_a_bias")), w["q_a_norm"], _LATENT_EPS), w["q_b"])
    q_NQX, q_turning = jnp.split(q.reshape(B * T, Q, X + Y), [X], axis=2)
    q_NQC = jnp.einsum("nqx,qcx->nqc", q_NQX.astype(w["k_up"].dtype), w["k_up"], preferred_element_type=jnp.float32)
    q_BTQY = apply_rope(q_turning.reshape(B, T, Q, Y), place.rotation)

    latent_NC, k_turning = jnp.split(linear(x_ND, w["kv_a"], w.get("kv_a_bias")), [C], axis=1)
    latent_NC = rms_norm(latent_NC, w["kv_a_norm"], _LATENT_EPS)
    k_BT1Y = apply_rope(k_turning.reshape(B, T, 1, Y), place.rotation)
    out, pool = attend(
        jnp.concatenate([q_NQC.reshape(B, T, Q, C), q_BTQY], axis=3),
        jnp.concatenate([latent_NC.reshape(B, T, 1, C), k_BT1Y], axis=3),
        pool,
        place,
        scale=(X + Y) ** -0.5 if config.attention_scale is None else config.attention_scale,
        value_size=C,
    )
    out_NQC = out.reshape(B * T, Q, C).astype(w["v_up"].dtype)
    out_NQU = jnp.einsum("nqc,quc->nqu", out_NQC, w["v_up"], preferred_element_type=jnp.float32)
    return joining(out_NQU.reshape(B * T, -1), w["o"], w.get("o_bias")), pool


def attention_names(config: ModelConfig) -> names.Names:
    """Where a layer's attention lies in a Hugging Face checkpoint, after "model.layers.N."."""
    mla, Q = _mla(config), config.num_heads
    turning = slice(mla.nope_head_dim, None)
    is_interleaved = config.rope is not None and config.rope.is_interleaved
    q_rows = names.halves_of_pairs(Q, turning) if is_interleaved else None
    kv_rows = names.halves_of_pairs(1, slice(mla.kv_lora_rank, None)) if is_interleaved else None
    kv_b, head_rows = ("self_attn.kv_b_proj.weight",), mla.nope_head_dim + mla.v_head_dim
    return {
        "attention_norm": TensorSource(("input_layernorm.weight",)),
        "q": TensorSource(("self_attn.q_proj.weight",), (q_rows,)),
        "q_a": TensorSource(("self_attn.q_a_proj.weight",)),
        "q_a_bias": TensorSource(("self_attn.q_a_proj.bias",)),
        "q_a_norm": TensorSource(("self_attn.q_a_layernorm.weight",)),
        "q_b": TensorSource(("self_attn.q_b_proj.weight",), (q_rows,)),
        "kv_a": TensorSource(("self_attn.kv_a_proj_with_mqa.weight",), (kv_rows,)),
        "kv_a_bias": TensorSource(("self_attn.kv_a_proj_with_mqa.bias",), (kv_rows,)),
        "kv_a_norm": TensorSource(("self_attn.kv_a_layernorm.weight",)),
        "k_up": TensorSource(kv_b, (HeadRows(head_rows, slice(0, mla.nope_head_dim), is_turned=True),)),
        "v_up": TensorSource(kv_b, (HeadRows(head_rows, slice(mla.nope_head_dim, head_rows)),)),
        "o": TensorSource(("self_attn.o_proj.weight",)),
        "o_bias": TensorSource(("self_attn.o_proj.bias",)),
        "mlp_norm": TensorSource(("post_attention_layernorm.weight",)),
    }


def name_table(config: ModelConfig, source: str) -> NameTable:
    """The layers past the model's own are its multi-token-prediction drafter's."""
    if source == "gguf":
        return _gguf_table(config)
    layer = {**attention_names(config), **names.HF_MLP, **names.hf_mlp_experts(config, "mlp.gate")}
    drafter = names.later_layers(config, r"model\.layers\.")
    unread = (*names.hf_unread(config), *drafter)
    return NameTable(names.hf_sources(config, specs(config, np.float32), layer), unread)


def _gguf_table(config: ModelConfig) -> NameTable:
    """Architecture "deepseek2": kv_b is split there already, its key half transposed."""
    mla, Q = _mla(config), config.num_heads
    q_rows = names.halves_of_pairs(Q, slice(mla.nope_head_dim, None))
    kv_rows = names.halves_of_pairs(1, slice(mla.kv_lora_rank, None))
    layer = {
        **names.GGUF_MLP,
        **names.GGUF_EXPERTS,
        "attention_norm": TensorSource(("attn_norm.weight",)),
        "q": TensorSource(("attn_q.weight",), (q_rows,)),
        "q_a": TensorSource(("attn_q_a.weight",)),
        "q_a_bias": TensorSource(("attn_q_a.bias",)),
        "q_a_norm": TensorSource(("attn_q_a_norm.weight",)),
        "q_b": TensorSource(("attn_q_b.weight",), (q_rows,)),
        "kv_a": TensorSource(("attn_kv_a_mqa.weight",), (kv_rows,)),
        "kv_a_bias": TensorSource(("attn_kv_a_mqa.bias",), (kv_rows,)),
        "kv_a_norm": TensorSource(("attn_kv_a_norm.weight",)),
        "k_up": TensorSource(("attn_k_b.weight",)),
        "v_up": TensorSource(("attn_v_b.weight",)),
        "o": TensorSource(("attn_output.weight",)),
        "o_bias": TensorSource(("attn_output.bias",)),
        "mlp_norm": TensorSource(("ffn_norm.weight",)),
    }
    return NameTable(names.gguf_sources(specs(config, np.float32), layer), names.later_layers(config, r"blk\."))


FAMILY = Family(
    specs,
    name_table,
    functools.partial(decoder_forward, attention=latent_attention),
    head_logits,
    int8_names=("q", "q_a", "q_b", "kv_a", "o", "gate_up", "down"),
)
