"""Device. EAGLE, EAGLE-3 and P-EAGLE heads: a few decoder layers over the target's states and the next tokens.

Source: Li et al. 2024 (EAGLE), section 4; Li et al. 2025 (EAGLE-3), section 3; Hui et al. 2026 (P-EAGLE).
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.heads import EagleConfig
from jaxspec.models import names
from jaxspec.models.attention import Place, attention_specs, self_attention
from jaxspec.models.base import Tokens, Weights
from jaxspec.models.decoder import norm_specs
from jaxspec.models.heads.base import RecurrentHead, file_names, joined, renamed
from jaxspec.models.layers import NORM_DTYPE, embed, gated_mlp, linear, mlp_specs, rms_norm
from jaxspec.models.rope import rope_tables
from jaxspec.types import ArraySpec, Pool
from jaxspec.weights.names import NameTable, TensorSource

# Of no use to drafting: which target tokens the draft vocabulary holds, old buffers.
_UNREAD = (r"(model\.)?t2d", r".*\.rotary_emb\.inv_freq")


def specs(config: EagleConfig, dtype: Any) -> Weights:
    """Every parameter in the files. Layer 0 of EAGLE-3 attends from embedding and features side by side."""
    model = config.model
    D, X = model.hidden_size, config.target_hidden_size
    layers = []
    for index in range(model.num_layers):
        layer: dict[str, Any] = dict(attention_specs(model, dtype))
        layer |= mlp_specs(D, model.intermediate_size, dtype, with_bias=model.mlp_bias)
        layer |= norm_specs(model, *_norms(config, index))
        if config.kind == "eagle3" and index == 0:
            layer["qkv"] = replace(layer["qkv"], shape=(layer["qkv"].shape[0], 2 * D))
        layers.append(layer)
    tree: dict[str, Any] = {"layers": layers}

    def norm(size: int) -> ArraySpec:
        return ArraySpec((size,), NORM_DTYPE, ("embed",), 0.0)

    num_streams = len(config.aux_streams)
    if config.mask_token_id is not None:  # what the features of a mask are made of, as a position's are of its streams
        tree["mask_hidden"] = ArraySpec((num_streams * X if num_streams else D,), dtype, ("stream",))
    if config.kind == "eagle" or num_streams:
        tree["fc"] = ArraySpec((D, num_streams * X if num_streams else 2 * D), dtype, ("embed", "stream"))
        if config.fc_bias:
            tree["fc_bias"] = ArraySpec((D,), dtype, ("embed",))
    if config.norm_before_fc:
        tree["fc_norm"] = norm(num_streams * X)
    if config.fc_norm:
        tree["stream_norms"] = [norm(X) for _ in range(num_streams)]
    if config.kind == "eagle3" or config.has_final_norm:
        tree["final_norm"] = norm(D)
    if config.has_embed:
        tree["embed"] = ArraySpec((model.vocab_size, D), dtype, ("vocab", "embed"))
    if config.has_head:
        tree["head"] = ArraySpec((config.draft_vocab_size, D), dtype, ("vocab", "embed"))
    if config.id_map is not None:
        tree["id_map"] = ArraySpec((config.draft_vocab_size,), jnp.int32, ("id",))
    return tree


def _norms(config: EagleConfig, index: int) -> tuple[str, ...]:
    if index > 0 or config.has_first_norm:
        return "attention_norm", "mlp_norm"
    return ("embed_norm", "features_norm", "mlp_norm") if config.kind == "eagle3" else ("mlp_norm",)


def name_table(config: EagleConfig, tensor_names: Collection[str]) -> NameTable:
    """Where each parameter lies, whoever exported it; a stored head that the tie overrules is left unread."""
    stored = file_names(tensor_names)
    layer = {**names.HF_ATTENTION, **names.HF_MLP}
    layer["embed_norm"] = layer["attention_norm"]
    layer["features_norm"] = TensorSource(("hidden_norm.weight",))
    ends = {
        "fc": "fc.weight",
        "fc_bias": "fc.bias",
        "fc_norm": "input_norm.weight",
        "final_norm": "norm.weight",
        "embed": "embed_tokens.weight",
        "head": "lm_head.weight",
        "id_map": config.id_map or "",
    }
    table = {}
    for path, child in specs(config, jnp.float32).items():
        if path == "layers":
            for index, tree in enumerate(child):
                for name in tree:
                    source = layer[name]
                    if name == "attention_norm" and index and config.is_later_norm_hidden_norm:
                        source = layer["features_norm"]
                    table[f"layers.{index}.{name}"] = renamed(source, stored, f"layers.{index}.")
        elif path == "stream_norms":
            for index in range(len(child)):
                table[f"{path}.{index}"] = renamed(TensorSource((f"fc_norm.{index}.weight",)), stored)
        elif path == "mask_hidden":
            table[path] = renamed(TensorSource((path,), (np.ravel,)), stored)
        else:
            table[path] = renamed(TensorSource((ends[path],)), stored)
    return NameTable(table, (*_UNREAD, *((r"(model\.)?lm_head\.weight",) if config.is_head_tied else ())))


def features(weights: Weights, config: EagleConfig, seen_BTX: jax.Array) -> jax.Array:
    """EAGLE-3's streams, normed where the config says so, through fc; a plain hidden state is taken as it is."""
    if not config.aux_streams:
        return seen_BTX
    B, T, _ = seen_BTX.shape
    x_NX = seen_BTX.reshape(B * T, -1)
    eps = config.model.norm_eps
    if config.norm_before_fc:
        x_NX = rms_norm(x_NX, weights["fc_norm"], eps)
    if config.fc_norm:
        parts = jnp.split(x_NX, len(config.aux_streams), axis=1)
        normed = [rms_norm(part, w, eps) for part, w in zip(parts, weights["stream_norms"], strict=True)]
        x_NX = jnp.concatenate(normed, axis=1)
    return linear(x_NX, weights["fc"], weights.get("fc_bias")).reshape(B, T, -1)


def forward(
    weights: Weights, config: EagleConfig, tokens: Tokens, features_BTD: jax.Array, pool: Pool
) -> tuple[jax.Array, jax.Array, Pool]:
    """The layers over pairs of next token and state; the pool is [L*P, 2G, S, H], as a decoder's."""
    model = config.model
    assert model.rope is not None
    eps, shape = model.norm_eps, features_BTD.shape
    embedded_BTD = embed(weights["embed"], tokens.token_ids_BT)
    rotation = rope_tables(tokens.positions_BT, model.rope, model.head_dim)
    if config.kind == "eagle":
        x_ND = linear(joined(embedded_BTD, features_BTD), weights["fc"], weights.get("fc_bias"))
    else:
        x_ND = features_BTD.reshape(-1, shape[-1])
    pages_a_layer = pool.shape[0] // model.num_layers
    for index, w in enumerate(weights["layers"]):
        place = Place(tokens=tokens, page_offset=jnp.int32(index * pages_a_layer), rotation=rotation)
        if "embed_norm" in w:
            normed_ND = rms_norm(x_ND, w["features_norm"], eps)
            x_ND = normed_ND if config.norm_before_residual else x_ND
            attended_from = jnp.concatenate(
                [rms_norm(embedded_BTD.reshape(x_ND.shape), w["embed_norm"], eps), normed_ND], axis=-1
            )
        else:
            attended_from = rms_norm(x_ND, w["attention_norm"], eps) if "attention_norm" in w else x_ND
        attended, pool = self_attention(w, attended_from, pool, place, model, window=model.sliding_window_layers[index])
        x_ND = x_ND + attended
        x_ND = x_ND + gated_mlp(w, rms_norm(x_ND, w["mlp_norm"], eps))
    x_BTD = x_ND.reshape(shape)
    if "final_norm" not in weights:
        return x_BTD, x_BTD, pool
    normed_BTD = rms_norm(x_BTD, weights["final_norm"], eps)
    return normed_BTD, normed_BTD if config.norm_output or config.kind == "eagle" else x_BTD, pool


HEAD = RecurrentHead(specs, name_table, features, forward)
