"""Device. DSpark's Markov head: what the draft before a place says about the one there, added to that place's logits.

Three kinds: a product of two thin matrices; the same, gated by the place's state; and one that remembers the drafts
before as well. Source: DSpark (DeepSeek, 2026), arXiv 2607.05147.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config.heads import DflashConfig
from jaxspec.models.base import Weights
from jaxspec.models.layers import embed, linear
from jaxspec.types import ArraySpec
from jaxspec.weights.names import TensorSource

NAMES = {
    "from_token": TensorSource(("markov_head.markov_w1.weight",)),
    "to_token": TensorSource(("markov_head.markov_w2.weight",)),
    "gate": TensorSource(("markov_head.gate_proj.weight",)),
    "gate_bias": TensorSource(("markov_head.gate_proj.bias",)),
    "joint": TensorSource(("markov_head.joint_proj.weight",)),
    "joint_bias": TensorSource(("markov_head.joint_proj.bias",)),
}


def specs(config: DflashConfig, dtype: Any) -> Weights:
    """Every parameter in the files."""
    D, R = config.model.hidden_size, config.markov_rank
    tree = {
        "from_token": ArraySpec((config.model.vocab_size, R), dtype, ("vocab", "rank")),
        "to_token": ArraySpec((config.draft_vocab_size, R), dtype, ("vocab", "rank")),
    }
    if config.markov == "gated":
        tree["gate"] = ArraySpec((R, D + R), dtype, ("rank", "embed"))
        tree["gate_bias"] = ArraySpec((R,), dtype, ("rank",))
    if config.markov == "rnn":
        tree["joint"] = ArraySpec((3 * R, 2 * R + D), dtype, ("rank", "embed"))
        tree["joint_bias"] = ArraySpec((3 * R,), dtype, ("rank",))
    return tree


def start(config: DflashConfig, num_rows: int) -> jax.Array:
    """The memory of a block's first place."""
    return jnp.zeros((num_rows, config.markov_rank), jnp.float32)


def step(
    weights: Weights, config: DflashConfig, token_ids_B: jax.Array, hidden_BD: jax.Array, memory_BX: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(what is added to a place's logits [B, draft V], the memory): token_ids are the target's, of the place before;
    hidden is what the vocabulary head reads here, X the rank."""
    said_BX = embed(weights["from_token"], token_ids_B[:, None])[:, 0]
    if config.markov == "gated":
        both = jnp.concatenate([hidden_BD, said_BX], axis=-1)
        said_BX = said_BX * jax.nn.sigmoid(linear(both, weights["gate"], weights["gate_bias"]))
    elif config.markov == "rnn":
        everything = jnp.concatenate([memory_BX, said_BX, hidden_BD], axis=-1)
        keep_BX, new_BX, said_BX = jnp.split(linear(everything, weights["joint"], weights["joint_bias"]), 3, axis=-1)
        keep_BX, said_BX = jax.nn.sigmoid(keep_BX), jnp.tanh(said_BX)
        memory_BX = keep_BX * memory_BX + (1 - keep_BX) * jnp.tanh(new_BX)
    return linear(said_BX, weights["to_token"]), memory_BX
