"""Device. GPT-2: learned positions, layer norms with biases, a plain MLP, no rotation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.models import names
from jaxspec.models.attention import Place, attention_specs, self_attention
from jaxspec.models.base import Family, Tokens, Weights
from jaxspec.models.decoder import Layer, head_logits, norm_specs, run_layers, with_ends, with_streams
from jaxspec.models.layers import NORM_DTYPE, embed, gelu_tanh, joining, layer_norm, linear
from jaxspec.types import ArraySpec, Pool
from jaxspec.weights.names import NameTable, TensorSource
from jaxspec.weights.transforms import Axes


def specs(config: ModelConfig, dtype: Any) -> Weights:
    """Every parameter. Weights are [out, in]; q, k, v are fused along out."""
    D, F = config.hidden_size, config.intermediate_size

    def bias(size: int, axis: str) -> ArraySpec:
        return ArraySpec((size,), NORM_DTYPE, (axis,))

    layer = {
        **norm_specs(config, "attention_norm", "mlp_norm"),
        "attention_norm_bias": bias(D, "embed"),
        "mlp_norm_bias": bias(D, "embed"),
        **attention_specs(config, dtype),
        "up": ArraySpec((F, D), dtype, ("ffn", "embed")),
        "up_bias": bias(F, "ffn"),
        "down": ArraySpec((D, F), dtype, ("embed", "ffn")),
        "down_bias": bias(D, "embed"),
    }
    tree = with_ends(config, dtype, [layer] * config.num_layers)
    tree["positions"] = ArraySpec((config.max_position_embeddings, D), dtype, ("position", "embed"))
    tree["final_norm_bias"] = bias(D, "embed")
    return tree


def forward(
    weights: Weights, config: ModelConfig, tokens: Tokens, pool: Pool, aux_streams: tuple[int, ...] = ()
) -> tuple[jax.Array, Pool]:
    """As `jaxspec.models.decoder.decoder_forward`; positions lie in [0, max_position_embeddings)."""
    x_BTD = embed(weights["embed"], tokens.token_ids_BT)
    x_BTD = x_BTD + embed(weights["positions"], jnp.maximum(tokens.positions_BT, 0))
    x_BTD, pool, streams = run_layers(
        lambda divisor: _layer(config, divisor),
        [i + 1 if config.scale_by_inverse_layer else 1 for i in range(config.num_layers)],
        weights["layers"],
        x_BTD,
        pool,
        tokens,
        [None] * config.num_layers,
        aux_streams,
    )
    return with_streams(
        layer_norm(x_BTD, weights["final_norm"], weights["final_norm_bias"], config.norm_eps), streams
    ), pool


def _layer(config: ModelConfig, score_divisor: int) -> Layer:
    eps = config.norm_eps

    def layer(w, x_BTD, pool, place: Place):
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        normed_ND = layer_norm(x_ND, w["attention_norm"], w["attention_norm_bias"], eps)
        out, pool = self_attention(w, normed_ND, pool, place, config, window=None, layer_scale=1 / score_divisor)
        x_ND = x_ND + out
        normed_ND = layer_norm(x_ND, w["mlp_norm"], w["mlp_norm_bias"], eps)
        x_ND = x_ND + joining(gelu_tanh(linear(normed_ND, w["up"], w["up_bias"])), w["down"], w["down_bias"])
        return x_ND.reshape(x_BTD.shape), pool

    return layer


def name_table(config: ModelConfig, source: str) -> NameTable:
    """Hugging Face stores matrices [in, out], GGUF files [out, in]."""
    if source == "gguf":
        layer = _both("attn_norm", "attention_norm", "attention_norm_bias")
        layer |= _both("attn_qkv", "qkv", "qkv_bias") | _both("attn_output", "o", "o_bias")
        layer |= _both("ffn_norm", "mlp_norm", "mlp_norm_bias")
        layer |= _both("ffn_up", "up", "up_bias") | _both("ffn_down", "down", "down_bias")
        ends = {
            **names.GGUF_ENDS,
            "positions": TensorSource(("position_embd.weight",)),
            "final_norm_bias": TensorSource(("output_norm.bias",)),
        }
        return NameTable(names.gguf_sources(specs(config, np.float32), layer, ends))
    layer = _both("ln_1", "attention_norm", "attention_norm_bias") | _both("ln_2", "mlp_norm", "mlp_norm_bias")
    layer |= _both("attn.c_attn", "qkv", "qkv_bias", Axes((1, 0))) | _both("attn.c_proj", "o", "o_bias", Axes((1, 0)))
    layer |= _both("mlp.c_fc", "up", "up_bias", Axes((1, 0))) | _both("mlp.c_proj", "down", "down_bias", Axes((1, 0)))
    ends = _both("ln_f", "final_norm", "final_norm_bias")
    ends |= {"embed": TensorSource(("wte.weight",)), "positions": TensorSource(("wpe.weight",))}
    prefix = config.tensor_prefix
    table = names.fill(
        specs(config, np.float32), ends, lambda name: prefix + name, lambda i, name: f"{prefix}h.{i}.{name}", layer
    )
    if not config.tie_word_embeddings:
        table["head"] = TensorSource(("lm_head.weight",))
    # Causal masks that old files carry.
    return NameTable(table, (*names.hf_unread(config), r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"))


def _both(stem: str, weight: str, bias: str, transform=None) -> dict[str, TensorSource]:
    return {
        weight: TensorSource((f"{stem}.weight",), (transform,)),
        bias: TensorSource((f"{stem}.bias",)),
    }


FAMILY = Family(specs, name_table, forward, head_logits, int8_names=("qkv", "o", "up", "down"))
