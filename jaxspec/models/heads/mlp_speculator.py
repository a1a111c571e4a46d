"""Device. The MLP speculator: a state and the last token give the next state, and that the next token.

Source: Wertheimer et al. 2024, section 3, and the weights' own code for the scales.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config.heads import MlpSpeculatorConfig
from jaxspec.models.base import Weights
from jaxspec.models.layers import NORM_DTYPE, embed, linear
from jaxspec.types import ArraySpec
from jaxspec.weights.names import NameTable, TensorSource

_EPS = 1e-6


def specs(config: MlpSpeculatorConfig, dtype: Any) -> Weights:
    """Every parameter in the files: a tied speculator has one of each, and a second projection for the later steps."""
    V, D, F = config.vocab_size, config.hidden_size, config.inner_size
    num = 1 if config.is_tied else config.num_steps
    num_projections = min(2, config.num_steps) if config.is_tied else config.num_steps
    later = ArraySpec((F, F), dtype, ("ffn", "ffn_in"))
    norm = {"weight": ArraySpec((F,), NORM_DTYPE, ("ffn",), 0.0), "bias": ArraySpec((F,), NORM_DTYPE, ("ffn",))}
    return {
        "emb": [ArraySpec((V, F), dtype, ("vocab", "ffn"))] * num,
        "proj": [ArraySpec((F, D), dtype, ("ffn", "embed")), *[later] * (num_projections - 1)],
        "head": [ArraySpec((V, F), dtype, ("vocab", "ffn"))] * num,
        "ln": [norm] * num,
    }


def name_table(config: MlpSpeculatorConfig, tensor_names: Collection[str]) -> NameTable:
    """speculator.PART.STEP.weight; what a tied file repeats for later steps is left unread."""
    table = {}
    for part, steps in specs(config, jnp.float32).items():
        for i in range(len(steps)):
            if part == "ln":
                table[f"ln.{i}.weight"] = TensorSource((f"speculator.ln.{i}.weight",))
                table[f"ln.{i}.bias"] = TensorSource((f"speculator.ln.{i}.bias",))
            else:
                table[f"{part}.{i}"] = TensorSource((f"speculator.{part}.{i}.weight",))
    repeats = (r"speculator\.(emb|head|ln|proj)\.\d+\.(weight|bias)",) if config.is_tied else ()
    return NameTable(table, repeats)


def _norm(x_BD: jax.Array) -> jax.Array:
    return x_BD * jax.lax.rsqrt(jnp.mean(jnp.square(x_BD), axis=-1, keepdims=True) + _EPS)


def start(config: MlpSpeculatorConfig, hidden_BD: jax.Array) -> jax.Array:
    """The target's hidden state as the first step takes it."""
    return _norm(hidden_BD) * 2**-0.5 if config.scale_input else hidden_BD


def step(
    weights: Weights, config: MlpSpeculatorConfig, index: int, state_BX: jax.Array, token_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(state_BF, logits_BV f32) of step `index`, after a token."""
    state_weight = 0.5 ** (0.5 / config.num_steps)
    embed_weight = ((1 - state_weight**2) * config.inner_size / 2) ** 0.5

    def of(part: str) -> Any:
        return weights[part][min(index, len(weights[part]) - 1)]

    embedded_BF = embed(of("emb"), token_B[:, None])[:, 0]
    x_BF = _norm(linear(state_BX, of("proj")) + embedded_BF * (embed_weight / state_weight))
    norm = of("ln")
    state_BF = jax.nn.gelu(x_BF * norm["weight"][None] + norm["bias"][None], approximate=False)
    return state_BF, linear(state_BF, of("head"))
