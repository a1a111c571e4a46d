"""Device. Medusa: residual blocks and a vocabulary head for each place ahead, all reading one state of the target.

Source: Cai et al. 2024, section 2.1.
"""

import re
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config.heads import MedusaConfig
from jaxspec.models.base import Weights
from jaxspec.models.layers import linear
from jaxspec.types import ArraySpec
from jaxspec.weights.names import NameTable, TensorSource


def specs(config: MedusaConfig, dtype: Any) -> Weights:
    """Every parameter in the files."""
    D, V = config.hidden_size, config.draft_vocab_size

    def block() -> dict[str, ArraySpec]:
        tree = {"weight": ArraySpec((D, D), dtype, ("embed", "embed_in"))}
        return tree | {"bias": ArraySpec((D,), dtype, ("embed",))} if config.has_bias else tree

    head = ArraySpec((V, D), dtype, ("vocab", "embed"))
    tree: dict[str, Any] = {"blocks": [[block() for _ in range(config.num_blocks)] for _ in range(config.num_heads)]}
    if config.own_heads == "each":
        tree["heads"] = [head] * config.num_heads
    elif config.own_heads == "one":
        tree["head"] = head
    if config.has_map:
        tree["id_map"] = ArraySpec((V,), jnp.int32, ("id",))
    return tree


def name_table(config: MedusaConfig, tensor_names: Collection[str]) -> NameTable:
    """The original's numbers, or vLLM's words; either may have a prefix, and a whole model may lie around the first."""
    plain = {re.sub(r"^medusa_heads?\.", "", name): name for name in tensor_names}
    is_vllm = "blocks.0.layers.0.weight" in plain

    def source(name: str) -> TensorSource:
        return TensorSource((plain.get(name, name),))

    table = {}
    for i in range(config.num_heads):
        for j in range(config.num_blocks):
            stem = f"blocks.{i}.layers.{j}" if is_vllm else f"{i}.{j}.linear"
            table[f"blocks.{i}.{j}.weight"] = source(f"{stem}.weight")
            if config.has_bias:
                table[f"blocks.{i}.{j}.bias"] = source(f"{stem}.bias")
        if config.own_heads == "each":
            table[f"heads.{i}"] = source(f"lm_heads.{i}.weight" if is_vllm else f"{i}.{config.num_blocks}.weight")
    if config.own_heads == "one":
        table["head"] = source("lm_head.weight")
    if config.has_map:
        table["id_map"] = source("token_map")
    # Medusa-2 files hold the model too.
    is_whole_model = any(name.startswith("medusa_head.") for name in tensor_names)
    return NameTable(table, (r"model\..*", r"lm_head\.weight") if is_whole_model else ())


def blocks(weights: Weights, config: MedusaConfig, hidden_BD: jax.Array, num_heads: int) -> jax.Array:
    """hidden_BKD: the state as each of the first heads turns it; their vocabulary heads read it."""
    out = []
    for head in weights["blocks"][:num_heads]:
        x_BD = hidden_BD
        for block in head:
            x_BD = x_BD + jax.nn.silu(linear(x_BD, block["weight"], block.get("bias")))
        out.append(x_BD)
    return jnp.stack(out, axis=1)


def own_logits(weights: Weights, config: MedusaConfig, hidden_BKD: jax.Array) -> jax.Array:
    """logits_BKV f32, of the file's own vocabulary heads."""
    K = hidden_BKD.shape[1]
    heads = weights["heads"] if config.own_heads == "each" else [weights["head"]] * K
    logits = jnp.stack([linear(hidden_BKD[:, k], heads[k]) for k in range(K)], axis=1)
    return logits if config.logit_scale == 1.0 else logits * config.logit_scale
