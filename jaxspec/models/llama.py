"""Device. The Llama skeleton: Llama 1 to 3.1, Mistral, Qwen2 and Qwen3, told apart by their config alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.models.base import Family, Tokens, Weights
from jaxspec.models.layers import apply_rope, linear, rms_norm, rope_frequencies, rope_tables
from jaxspec.pallas_kernels.kv_write import kv_write
from jaxspec.pallas_kernels.paged_attention import paged_attention
from jaxspec.types import ArraySpec
from jaxspec.weights.names import NameTable, TensorSource, Transform

_NORM_DTYPE = np.float32  # tiny, and read in float32


def specs(config: ModelConfig, dtype: Any) -> Weights:
    """Every parameter. Weights are [out, in]; q, k, v are fused along out, and so are gate and up."""
    D, F, H, V = config.hidden_size, config.intermediate_size, config.head_dim, config.vocab_size
    Q, G = config.num_heads, config.num_kv_heads

    def layer() -> dict[str, ArraySpec]:
        tree = {
            "attention_norm": ArraySpec((D,), _NORM_DTYPE, ("embed",), 0.0),
            "qkv": ArraySpec(((Q + 2 * G) * H, D), dtype, ("heads", "embed")),
            "o": ArraySpec((D, Q * H), dtype, ("embed", "heads")),
            "mlp_norm": ArraySpec((D,), _NORM_DTYPE, ("embed",), 0.0),
            "gate_up": ArraySpec((2 * F, D), dtype, ("ffn", "embed")),
            "down": ArraySpec((D, F), dtype, ("embed", "ffn")),
        }
        if config.qkv_bias:
            tree["qkv_bias"] = ArraySpec(((Q + 2 * G) * H,), dtype, ("heads",))
        if config.o_bias:
            tree["o_bias"] = ArraySpec((D,), dtype, ("embed",))
        if config.mlp_bias:
            tree["gate_up_bias"] = ArraySpec((2 * F,), dtype, ("ffn",))
            tree["down_bias"] = ArraySpec((D,), dtype, ("embed",))
        if config.qk_norm:
            tree["q_norm"] = ArraySpec((H,), _NORM_DTYPE, ("head_dim",), 0.0)
            tree["k_norm"] = ArraySpec((H,), _NORM_DTYPE, ("head_dim",), 0.0)
        return tree

    tree = {
        "embed": ArraySpec((V, D), dtype, ("vocab", "embed")),
        "layers": [layer() for _ in range(config.num_layers)],
        "final_norm": ArraySpec((D,), _NORM_DTYPE, ("embed",), 0.0),
    }
    if not config.tie_word_embeddings:
        tree["head"] = ArraySpec((V, D), dtype, ("vocab", "embed"))
    return tree


def forward(weights: Weights, config: ModelConfig, tokens: Tokens, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Run every layer over the tokens; keys and values enter the pool before they are attended to.

    Args:
        weights: as `specs` describes.
        tokens: B rows of T tokens.
        pool: [L*P, 2G, S, H]; layer l owns pages [l*P, (l+1)*P).

    Returns:
        hidden_BTD f32, after the final norm, and the pool.
    """
    pages_a_layer = pool.shape[0] // config.num_layers
    # The barrier ties the table to the ids: XLA on CPU looks bfloat16 rows up in a converted table, and would convert
    # the whole of it ahead of any loop that it does not vary in, such as a drafter's steps.
    embed_VD, token_ids_BT = jax.lax.optimization_barrier((weights["embed"], tokens.token_ids_BT))
    x_BTD = embed_VD[token_ids_BT].astype(jnp.float32)
    frequencies = rope_frequencies(config.rope, config.head_dim)
    cos, sin = rope_tables(tokens.positions_BT, frequencies)

    # One jitted layer a window, traced once and called L times: tracing 30 unrolled layers would dominate start-up.
    layers = {w: jax.jit(_layer(config, w)) for w in set(config.sliding_window_layers)}
    for index, window in enumerate(config.sliding_window_layers):
        offset = jnp.int32(index * pages_a_layer)
        x_BTD, pool = layers[window](weights["layers"][index], x_BTD, pool, tokens, offset, cos, sin)
    return rms_norm(x_BTD, weights["final_norm"], config.rms_norm_eps), pool


def _layer(config: ModelConfig, window: int | None):
    Q, G, H, F = config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size
    eps = config.rms_norm_eps

    def layer(w, x_BTD, pool, tokens: Tokens, page_offset, cos, sin):
        B, T, D = x_BTD.shape
        x_ND = x_BTD.reshape(B * T, D)
        qkv = linear(rms_norm(x_ND, w["attention_norm"], eps), w["qkv"], w.get("qkv_bias"))
        q, k, v = jnp.split(qkv.reshape(B, T, Q + 2 * G, H), [Q, Q + G], axis=2)
        if config.qk_norm:
            q, k = rms_norm(q, w["q_norm"], eps), rms_norm(k, w["k_norm"], eps)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)

        slot_offset = page_offset * pool.shape[2]
        slots_N = jnp.where(tokens.slots_BT < 0, -1, tokens.slots_BT + slot_offset).reshape(B * T)
        pool = kv_write(pool, jnp.concatenate([k, v], axis=2).reshape(B * T, 2 * G, H), slots_N)
        pages_BM = jnp.where(tokens.pages_BM < 0, -1, tokens.pages_BM + page_offset)
        out = paged_attention(q, pool, pages_BM, tokens.positions_BT, scale=H**-0.5, window=window)

        x_ND = x_ND + linear(out.reshape(B * T, Q * H), w["o"], w.get("o_bias"))
        gate_up = linear(rms_norm(x_ND, w["mlp_norm"], eps), w["gate_up"], w.get("gate_up_bias"))
        mlp = jax.nn.silu(gate_up[:, :F]) * gate_up[:, F:]
        x_ND = x_ND + linear(mlp, w["down"], w.get("down_bias"))
        return x_ND.reshape(B, T, D), pool

    return layer


def logits(weights: Weights, config: ModelConfig, hidden_BTD: jax.Array) -> jax.Array:
    """The head: logits_BTV f32."""
    B, T, D = hidden_BTD.shape
    head = weights["embed"] if config.tie_word_embeddings else weights["head"]
    return linear(hidden_BTD.reshape(B * T, D), head).reshape(B, T, config.vocab_size)


def name_table(config: ModelConfig, source: str) -> NameTable:
    """Where each parameter lies in a Hugging Face folder ("hf") or a GGUF file ("gguf")."""
    if source == "gguf":
        return _gguf_table(config)
    # Old files keep rotary buffers; some fine-tunes of tied models keep a head, which the tie overrules.
    unread = (r".*\.rotary_emb\.inv_freq", *((r"lm_head\.weight",) if config.tie_word_embeddings else ()))
    return NameTable(_hf_sources(config), unread)


def _hf_sources(config: ModelConfig) -> dict[str, TensorSource]:
    table = {
        "embed": TensorSource(("model.embed_tokens.weight",)),
        "final_norm": TensorSource(("model.norm.weight",)),
    }
    if not config.tie_word_embeddings:
        table["head"] = TensorSource(("lm_head.weight",))
    for i in range(config.num_layers):
        here, there = f"layers.{i}.", f"model.layers.{i}."
        qkv, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
        table[here + "attention_norm"] = TensorSource((there + "input_layernorm.weight",))
        table[here + "qkv"] = TensorSource(tuple(f"{there}self_attn.{n}.weight" for n in qkv))
        table[here + "o"] = TensorSource((there + "self_attn.o_proj.weight",))
        table[here + "mlp_norm"] = TensorSource((there + "post_attention_layernorm.weight",))
        table[here + "gate_up"] = TensorSource(tuple(f"{there}mlp.{n}.weight" for n in gate_up))
        table[here + "down"] = TensorSource((there + "mlp.down_proj.weight",))
        if config.qkv_bias:
            table[here + "qkv_bias"] = TensorSource(tuple(f"{there}self_attn.{n}.bias" for n in qkv))
        if config.o_bias:
            table[here + "o_bias"] = TensorSource((there + "self_attn.o_proj.bias",))
        if config.mlp_bias:
            table[here + "gate_up_bias"] = TensorSource(tuple(f"{there}mlp.{n}.bias" for n in gate_up))
            table[here + "down_bias"] = TensorSource((there + "mlp.down_proj.bias",))
        if config.qk_norm:
            table[here + "q_norm"] = TensorSource((there + "self_attn.q_norm.weight",))
            table[here + "k_norm"] = TensorSource((there + "self_attn.k_norm.weight",))
    return table


def _gguf_table(config: ModelConfig) -> NameTable:
    # llama.cpp permutes q and k rows of architecture "llama" (Llama, Mistral) for its interleaved rotary embedding.
    permuted = config.model_type == "llama"
    q_rows: Transform | None = _unpermute(config.num_heads) if permuted else None
    k_rows: Transform | None = _unpermute(config.num_kv_heads) if permuted else None
    table = {
        "embed": TensorSource(("token_embd.weight",)),
        "final_norm": TensorSource(("output_norm.weight",)),
    }
    if not config.tie_word_embeddings:
        table["head"] = TensorSource(("output.weight",))
    for i in range(config.num_layers):
        here, there = f"layers.{i}.", f"blk.{i}."
        table[here + "attention_norm"] = TensorSource((there + "attn_norm.weight",))
        qkv = (there + "attn_q", there + "attn_k", there + "attn_v")
        table[here + "qkv"] = TensorSource(tuple(f"{n}.weight" for n in qkv), (q_rows, k_rows, None))
        table[here + "o"] = TensorSource((there + "attn_output.weight",))
        table[here + "mlp_norm"] = TensorSource((there + "ffn_norm.weight",))
        table[here + "gate_up"] = TensorSource((there + "ffn_gate.weight", there + "ffn_up.weight"))
        table[here + "down"] = TensorSource((there + "ffn_down.weight",))
        if config.qkv_bias:
            table[here + "qkv_bias"] = TensorSource(tuple(f"{n}.bias" for n in qkv), (q_rows, k_rows, None))
        if config.o_bias:
            table[here + "o_bias"] = TensorSource((there + "attn_output.bias",))
        if config.mlp_bias:
            table[here + "gate_up_bias"] = TensorSource((there + "ffn_gate.bias", there + "ffn_up.bias"))
            table[here + "down_bias"] = TensorSource((there + "ffn_down.bias",))
        if config.qk_norm:
            table[here + "q_norm"] = TensorSource((there + "attn_q_norm.weight",))
            table[here + "k_norm"] = TensorSource((there + "attn_k_norm.weight",))
    # The frequencies are read with the config (RopeConfig.divisors), not as a weight.
    return NameTable(table, (r"rope_freqs\.weight",))


def _unpermute(num_heads: int) -> Transform:
    def transform(weight: np.ndarray) -> np.ndarray:
        half = weight.shape[0] // num_heads // 2
        return weight.reshape(num_heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)

    return transform


FAMILY = Family(specs, name_table, forward, logits, int8_names=("qkv", "o", "gate_up", "down"))
