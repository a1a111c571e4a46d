"""Device. DFlash and DSpark: one pass fills a block of mask tokens, attending to keys made of the target's streams.

The pool holds keys and values of committed positions, which no layer's own output enters; a block's own keys are
written behind them for the pass, and overwritten later. Source: Chen et al. 2026 (DFlash).
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import shards
from jaxspec.cache.pages import write_entries
from jaxspec.config.heads import DflashConfig
from jaxspec.models import names
from jaxspec.models.attention import Place, attend, attention_specs
from jaxspec.models.base import Tokens, Weights
from jaxspec.models.decoder import norm_specs
from jaxspec.models.heads import markov
from jaxspec.models.heads.base import file_names, renamed
from jaxspec.models.layers import NORM_DTYPE, embed, gated_mlp, linear, mlp_specs, rms_norm
from jaxspec.models.rope import apply_rope, rope_tables
from jaxspec.types import ArraySpec, Pool
from jaxspec.weights.names import NameTable, TensorSource


def specs(config: DflashConfig, dtype: Any) -> Weights:
    """Every parameter in the files."""
    model = config.model
    D = model.hidden_size
    layer = norm_specs(model, "attention_norm", "mlp_norm") | attention_specs(model, dtype)
    layer |= mlp_specs(D, model.intermediate_size, dtype, with_bias=model.mlp_bias)
    width = len(config.aux_streams) * config.target_hidden_size
    tree: dict[str, Any] = {
        "fc": ArraySpec((D, width), dtype, ("embed", "stream")),
        "context_norm": ArraySpec((D,), NORM_DTYPE, ("embed",), 0.0),
        "layers": [layer] * model.num_layers,
        "final_norm": ArraySpec((D,), NORM_DTYPE, ("embed",), 0.0),
    }
    if config.has_embed:
        tree["embed"] = ArraySpec((model.vocab_size, D), dtype, ("vocab", "embed"))
    if config.has_head:
        tree["head"] = ArraySpec((config.draft_vocab_size, D), dtype, ("vocab", "embed"))
    if config.has_mask_embedding:
        tree["mask_embedding"] = ArraySpec((D,), dtype, ("embed",))
    if config.markov is not None:
        tree["markov"] = markov.specs(config, dtype)
    if config.has_map:
        tree["id_map"] = ArraySpec((config.draft_vocab_size,), jnp.int32, ("id",))
    return tree


def name_table(config: DflashConfig, tensor_names: Collection[str]) -> NameTable:
    """Qwen3's names for the layers."""
    stored = file_names(tensor_names)
    layer = {**names.HF_ATTENTION, **names.HF_MLP}
    ends = {
        "fc": "fc.weight",
        "context_norm": "hidden_norm.weight",
        "final_norm": "norm.weight",
        "embed": "embed_tokens.weight",
        "head": "lm_head.weight",
        "mask_embedding": "mask_embedding",
        "id_map": "d2t",
    }
    table = {}
    for path, child in specs(config, jnp.float32).items():
        if path == "layers":
            for i, tree in enumerate(child):
                table |= {f"layers.{i}.{name}": renamed(layer[name], stored, f"layers.{i}.") for name in tree}
        elif path == "markov":
            table |= {f"markov.{name}": renamed(markov.NAMES[name], stored) for name in child}
        else:
            table[path] = renamed(TensorSource((ends[path],)), stored)
    unread = (r"(model\.)?t2d", r".*\.rotary_emb\.inv_freq")
    # What it says decides how many drafts are worth verifying, never which.
    return NameTable(table, unread if config.markov is None else (*unread, r"(model\.)?confidence_head\.proj\..*"))


def remember(weights: Weights, config: DflashConfig, tokens: Tokens, streams_BTX: jax.Array, pool: Pool) -> Pool:
    """The pool with the keys and values of committed positions; token_ids are not looked at."""
    model = config.model
    assert model.rope is not None
    B, T, X = streams_BTX.shape
    G, H, Q = model.num_kv_heads, model.head_dim, model.num_heads
    context_ND = linear(streams_BTX.reshape(B * T, X), weights["fc"])
    context_ND = rms_norm(context_ND, weights["context_norm"], model.norm_eps)
    rotation = rope_tables(tokens.positions_BT, model.rope, H)
    pages_a_layer = pool.shape[0] // model.num_layers
    for index, w in enumerate(weights["layers"]):
        # Keys and values alone: the first Q * H rows make queries.
        bias = w.get("qkv_bias")
        kv = linear(context_ND, w["qkv"][Q * H :], None if bias is None else bias[Q * H :])
        k, v = jnp.split(kv.reshape(B, T, 2 * G, H), 2, axis=2)
        k = apply_rope(rms_norm(k, w["k_norm"], model.norm_eps), rotation)
        entries_NGH = jnp.concatenate([k, v * config.value_scale], axis=2).reshape(B * T, 2 * G, H)
        offset = index * pages_a_layer * pool.shape[2]
        slots_N = jnp.where(tokens.slots_BT < 0, -1, tokens.slots_BT + offset).reshape(B * T)
        pool = write_entries(pool, entries_NGH, slots_N)
    return pool


def forward(weights: Weights, config: DflashConfig, tokens: Tokens, pool: Pool) -> tuple[jax.Array, Pool]:
    """hidden_BTD of a block, which the vocabulary head reads: token_ids are the last committed token, then masks.

    A layer that is not causal lets every token of the block see all of it. A block has all T tokens or none.
    """
    model = config.model
    assert model.rope is not None
    B, T = tokens.token_ids_BT.shape
    Q, G, H, eps = model.num_heads, model.num_kv_heads, model.head_dim, model.norm_eps
    x_BTD = embed(weights["embed"], jnp.minimum(tokens.token_ids_BT, shards.whole_size(weights["embed"], axis=0) - 1))
    if "mask_embedding" in weights:
        is_mask_BT = tokens.token_ids_BT == config.mask_token_id
        x_BTD = jnp.where(is_mask_BT[..., None], weights["mask_embedding"].astype(x_BTD.dtype), x_BTD)
    x_ND = x_BTD.reshape(B * T, -1)
    rotation = rope_tables(tokens.positions_BT, model.rope, H)
    last_B1 = jnp.max(tokens.positions_BT, axis=1, keepdims=True)
    from_the_end = dataclasses.replace(tokens, positions_BT=jnp.where(tokens.positions_BT < 0, -1, last_B1))
    pages_a_layer = pool.shape[0] // model.num_layers
    for index, w in enumerate(weights["layers"]):
        is_causal, window = config.is_causal[index], model.sliding_window_layers[index]
        offset = jnp.int32(index * pages_a_layer)
        place = Place(tokens=tokens if is_causal else from_the_end, page_offset=offset, rotation=rotation)
        qkv = linear(rms_norm(x_ND, w["attention_norm"], eps), w["qkv"], w.get("qkv_bias"))
        q, k, v = jnp.split(qkv.reshape(B, T, Q + 2 * G, H), [Q, Q + G], axis=2)
        q, k = (apply_rope(rms_norm(y, w[norm], eps), rotation) for y, norm in ((q, "q_norm"), (k, "k_norm")))
        entries = jnp.concatenate([k, v * config.value_scale], axis=2)
        if is_causal or window is None:
            out, pool = attend(q, entries, pool, place, scale=H**-0.5, window=window)
        else:
            out, pool = _attend_around(q, entries, pool, place, scale=H**-0.5, window=window)
        x_ND = x_ND + linear(out.reshape(B * T, Q * H), w["o"], w.get("o_bias"))
        x_ND = x_ND + gated_mlp(w, rms_norm(x_ND, w["mlp_norm"], eps))
    return rms_norm(x_ND, weights["final_norm"], eps).reshape(B, T, -1), pool


def _attend_around(
    q_BTQH: jax.Array, entries_BTGH: jax.Array, pool: Pool, place: Place, *, scale: float, window: int
) -> tuple[jax.Array, Pool]:
    """As `attend`, where every token sees all of the block, and back from it no further than its window."""
    T, tokens, outs = q_BTQH.shape[1], place.tokens, []
    _, pool = attend(q_BTQH, entries_BTGH, pool, place, scale=scale)  # for what it writes
    for t in range(T):
        one = dataclasses.replace(
            tokens,
            token_ids_BT=tokens.token_ids_BT[:, t : t + 1],
            positions_BT=tokens.positions_BT[:, t : t + 1],
            slots_BT=tokens.slots_BT[:, t : t + 1],
        )
        # As from the block's end, T - 1 - t places behind the token.
        out, pool = attend(
            q_BTQH[:, t : t + 1],
            entries_BTGH[:, t : t + 1],
            pool,
            dataclasses.replace(place, tokens=one),
            scale=scale,
            window=window + T - 1 - t,
        )
        outs.append(out)
    return jnp.concatenate(outs, axis=1), pool
