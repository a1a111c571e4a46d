"""Device. Multi-token-prediction modules: each a layer of the target's kind over states and the next tokens.

Source: DeepSeek-V3's report, section 2.2; fed back is the state after the module's last norm, as in transformers and
SGLang (older vLLM feeds back the state before it).
"""

import dataclasses
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.heads import MtpConfig
from jaxspec.models import deepseek_v3
from jaxspec.models.attention import Place
from jaxspec.models.base import Tokens, Weights
from jaxspec.models.decoder import pre_norm_layer
from jaxspec.models.heads.base import RecurrentHead, as_they_are, joined
from jaxspec.models.layers import NORM_DTYPE, embed, linear, rms_norm
from jaxspec.models.registry import family_of
from jaxspec.models.rope import rope_tables
from jaxspec.types import ArraySpec, Pool
from jaxspec.weights.names import NameTable, TensorSource
from jaxspec.weights.transforms import PlusOne


class _Layout(NamedTuple):
    """Where a family keeps module {i}'s own parts, after the prefix; final_norm "" = there is none."""

    embed_norm: str
    state_norm: str
    fc: str
    final_norm: str
    layer: str
    norms_plus_one: bool = False  # norms are stored as what is added to 1
    is_state_first: bool = False  # the projection reads the state before the embedding


_LAYOUTS = {
    "nextn": _Layout("{i}.enorm", "{i}.hnorm", "{i}.eh_proj", "{i}.shared_head.norm", "{i}."),
    "mtp": _Layout("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.{i}.", norms_plus_one=True),
    "ernie": _Layout("emb_norm.{i}", "hidden_norm.{i}", "linear_proj.{i}", "", "block.{i}."),
    "mimo": _Layout(
        "{i}.token_layernorm", "{i}.hidden_layernorm", "{i}.input_proj", "{i}.final_layernorm", "{i}.",
        is_state_first=True,
    ),
}  # fmt: skip
_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm")


def specs(config: MtpConfig, dtype: Any) -> Weights:
    """Every parameter in the files, of several modules under "modules"; the layer's are those of the target's family,
    and a gate in Qwen's module."""
    model = config.model
    V, D = model.vocab_size, model.hidden_size
    layer = dict(family_of(model.family).specs(model, dtype)["layers"][0])
    if config.layout == "mtp":
        layer["gate"] = ArraySpec((model.num_heads * model.head_dim, D), dtype, ("heads", "embed"))
    tree = {
        "embed_norm": ArraySpec((D,), NORM_DTYPE, ("embed",), 0.0),
        "state_norm": ArraySpec((D,), NORM_DTYPE, ("embed",), 0.0),
        "fc": ArraySpec((D, 2 * D), dtype, ("embed", "stream")),
        "layer": layer,
    }
    if config.fc_bias:
        tree["fc_bias"] = ArraySpec((D,), dtype, ("embed",))
    if _LAYOUTS[config.layout].final_norm:
        tree["final_norm"] = ArraySpec((D,), NORM_DTYPE, ("embed",), 0.0)
    if config.has_embed:
        tree["embed"] = ArraySpec((V, D), dtype, ("vocab", "embed"))
    if config.has_head:
        tree["head"] = ArraySpec((V, D), dtype, ("vocab", "embed"))
    return tree if config.num_modules == 1 else {"modules": [tree] * config.num_modules}


def name_table(config: MtpConfig, tensor_names: Collection[str]) -> NameTable:
    """The modules' tensors lie among the target's, which are left unread here."""
    del tensor_names
    table: dict[str, TensorSource] = {}
    for k in range(config.num_modules):
        path = f"modules.{k}." if config.num_modules > 1 else ""
        table |= {path + name: source for name, source in _module_table(config, config.first + k).items()}
    own = {config.prefix}
    if config.layout in ("nextn", "mimo"):
        own = {f"{config.prefix}{config.first + k}." for k in range(config.num_modules)}
    return NameTable(table, (rf"(?!{'|'.join(re.escape(prefix) for prefix in sorted(own))}).*",))


def _module_table(config: MtpConfig, number: int) -> dict[str, TensorSource]:
    layout, model = _LAYOUTS[config.layout], config.model
    plus_one = (PlusOne(),) if layout.norms_plus_one else ()

    def stored(name: str) -> str:
        return config.prefix + name.format(i=number)

    table = {
        "embed_norm": TensorSource((stored(f"{layout.embed_norm}.weight"),), plus_one),
        "state_norm": TensorSource((stored(f"{layout.state_norm}.weight"),), plus_one),
        "fc": TensorSource((stored(f"{layout.fc}.weight"),)),
    }
    if config.fc_bias:
        table["fc_bias"] = TensorSource((stored(f"{layout.fc}.bias"),))
    if layout.final_norm:
        table["final_norm"] = TensorSource((stored(f"{layout.final_norm}.weight"),), plus_one)
    if config.has_embed:
        table["embed"] = TensorSource((stored("{i}.embed_tokens.weight"),))
    if config.has_head:
        table["head"] = TensorSource((stored("{i}.shared_head.head.weight"),))
    family_layer = f"{model.tensor_prefix}layers.0."
    for path, source in family_of(model.family).name_table(model, "hf").sources.items():
        if path.startswith("layers.0."):
            names = tuple(stored(layout.layer) + name.removeprefix(family_layer) for name in source.names)
            transforms = plus_one if path.removeprefix("layers.0.") in _NORMS and plus_one else source.transforms
            table[f"layer.{path.removeprefix('layers.0.')}"] = TensorSource(names, transforms)
    if config.layout == "mtp":
        _split_gate(table, model.num_heads)
    return table


def _split_gate(table: dict[str, TensorSource], num_heads: int) -> None:
    """q_proj holds each head's query rows, then its gate rows."""

    def half(index: int):
        def transform(weight: np.ndarray) -> np.ndarray:
            heads = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
            return heads[:, index].reshape(-1, *weight.shape[1:])

        return transform

    for path in ("layer.qkv", "layer.qkv_bias"):
        if path in table:
            table[path] = dataclasses.replace(table[path], transforms=(half(0), None, None))
    table["layer.gate"] = TensorSource(table["layer.qkv"].names[:1], (half(1),))


def forward(
    weights: Weights, config: MtpConfig, tokens: Tokens, features_BTD: jax.Array, pool: Pool, module: int = 0
) -> tuple[jax.Array, jax.Array, Pool]:
    """Norms of embedding and state, the projection of both, the layer, the last norm: of one module, by its weights.

    Module k of several has the pages of layer k; its token_ids are those k + 1 places after the positions.
    """
    model, layout = config.model, _LAYOUTS[config.layout]
    assert model.rope is not None
    eps = model.norm_eps
    embedded_BTD = rms_norm(embed(weights["embed"], tokens.token_ids_BT), weights["embed_norm"], eps)
    state_BTD = rms_norm(features_BTD, weights["state_norm"], eps)
    pair = joined(state_BTD, embedded_BTD) if layout.is_state_first else joined(embedded_BTD, state_BTD)
    x_BTD = linear(pair, weights["fc"], weights.get("fc_bias")).reshape(features_BTD.shape)
    is_latent = model.mla is not None
    turning = model.mla.rope_head_dim if model.mla is not None else model.head_dim
    rotation = rope_tables(tokens.positions_BT, model.rope, turning)
    page_offset = module * (pool.shape[0] // config.num_modules)
    place = Place(tokens=tokens, page_offset=jnp.int32(page_offset), rotation=rotation)
    layer = deepseek_v3.latent_layer(model) if is_latent else pre_norm_layer(model, None)
    x_BTD, pool = layer(weights["layer"], x_BTD, pool, place)
    out_BTD = rms_norm(x_BTD, weights["final_norm"], eps) if layout.final_norm else x_BTD
    return out_BTD, out_BTD, pool


HEAD = RecurrentHead(specs, name_table, as_they_are, forward)
