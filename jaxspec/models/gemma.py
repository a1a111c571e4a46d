"""Device. Gemma 2 and 3 (text): norms before and after each block, a scaled embedding, softcaps, sliding windows
between full layers, and in Gemma 3 a rotation of their own for them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.models import names
from jaxspec.models.attention import Place, attention_specs, self_attention
from jaxspec.models.base import Family, Tokens, Weights
from jaxspec.models.decoder import DENSE_NAMES, Layer, head_logits, norm_specs, run_layers, with_ends, with_streams
from jaxspec.models.layers import embed, gated_mlp, gelu_tanh, mlp_specs, rms_norm
from jaxspec.models.rope import rope_tables
from jaxspec.types import Pool
from jaxspec.weights.names import NameTable, TensorSource
from jaxspec.weights.transforms import PlusOne

_NORMS = ("attention_norm", "after_attention_norm", "mlp_norm", "after_mlp_norm")


def specs(config: ModelConfig, dtype: Any) -> Weights:
    """Norm weights are what multiplies: 1 + w of a Hugging Face checkpoint."""
    layer = norm_specs(config, *_NORMS) | attention_specs(config, dtype)
    layer |= mlp_specs(config.hidden_size, config.intermediate_size, dtype, with_bias=False)
    return with_ends(config, dtype, [layer] * config.num_layers)


def forward(
    weights: Weights, config: ModelConfig, tokens: Tokens, pool: Pool, aux_streams: tuple[int, ...] = ()
) -> tuple[jax.Array, Pool]:
    """As `jaxspec.models.decoder.decoder_forward`."""
    assert config.rope is not None
    # The constant was rounded to the activations' type in training, which is the weights'.
    scale = jnp.asarray(math.sqrt(config.hidden_size), weights["embed"].dtype).astype(jnp.float32)
    x_BTD = embed(weights["embed"], tokens.token_ids_BT) * scale
    full = rope_tables(tokens.positions_BT, config.rope, config.head_dim)
    local = rope_tables(tokens.positions_BT, config.local_rope or config.rope, config.head_dim)
    x_BTD, pool, streams = run_layers(
        lambda window: _layer(config, window),
        config.sliding_window_layers,
        weights["layers"],
        x_BTD,
        pool,
        tokens,
        [full if window is None else local for window in config.sliding_window_layers],
        aux_streams,
    )
    return with_streams(rms_norm(x_BTD, weights["final_norm"], config.norm_eps), streams), pool


def _layer(config: ModelConfig, window: int | None) -> Layer:
    eps = config.norm_eps

    def layer(w, x_BTD, pool, place: Place):
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        out, pool = self_attention(w, rms_norm(x_ND, w["attention_norm"], eps), pool, place, config, window=window)
        x_ND = x_ND + rms_norm(out, w["after_attention_norm"], eps)
        out = gated_mlp(w, rms_norm(x_ND, w["mlp_norm"], eps), gelu_tanh)
        x_ND = x_ND + rms_norm(out, w["after_mlp_norm"], eps)
        return x_ND.reshape(x_BTD.shape), pool

    return layer


def name_table(config: ModelConfig, source: str) -> NameTable:
    """Hugging Face stores norms as w, GGUF files as 1 + w. A multimodal checkpoint's vision tower is not the text
    model's."""
    if source == "gguf":
        after = {
            "after_attention_norm": TensorSource(("post_attention_norm.weight",)),
            "after_mlp_norm": TensorSource(("post_ffw_norm.weight",)),
        }
        layer = {**names.GGUF_ATTENTION, **names.GGUF_MLP, **after}
        return NameTable(names.gguf_sources(specs(config, np.float32), layer))
    norms = {
        "attention_norm": "input_layernorm",
        "after_attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "after_mlp_norm": "post_feedforward_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
    }
    plus_one = {path: TensorSource((f"{name}.weight",), (PlusOne(),)) for path, name in norms.items()}
    ends = {**names.HF_ENDS, "final_norm": TensorSource(("norm.weight",), (PlusOne(),))}
    layer = {**names.HF_ATTENTION, **names.HF_MLP, **plus_one}
    unread = (*names.hf_unread(config), r"(model\.)?(vision_tower|multi_modal_projector)\..*")
    return NameTable(names.hf_sources(config, specs(config, np.float32), layer, ends), unread)


FAMILY = Family(specs, name_table, forward, head_logits, int8_names=DENSE_NAMES)
