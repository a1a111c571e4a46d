"""Device. EAGLE: the head guesses the target's next state, and with the target's vocabulary head the next token.

Guess k of chain t reads the head's state of guess k - 1 (the target's for k = 0) and the token at t + 1 + k. Its state
is taught the target's at t + 1 + k, and the target's distribution of the token at t + 2 + k. Source: Li et al. 2024
(EAGLE), section 4.2, whose two losses and weights these are; unrolled over its own states as Zhang et al. 2025 (HASS),
section 3.2, where EAGLE itself adds noise to the target's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config.heads import EagleConfig
from jaxspec.config.hf_heads import head_config
from jaxspec.config.model import ModelConfig
from jaxspec.models.chains import new_chains, next_pass
from jaxspec.models.heads import eagle as eagle_head
from jaxspec.train.batches import Batch
from jaxspec.train.config import EagleHead
from jaxspec.train.export import exporter
from jaxspec.train.target import FrozenTarget, whole_rows
from jaxspec.train.trainers.base import (
    Guess,
    Trainer,
    as_specs_say,
    is_answer,
    random_params,
    shifted,
    taught,
    total,
)
from jaxspec.train.trainers.layers import fused_rows, layer_values


def hf_config(head: EagleHead, target: ModelConfig) -> dict[str, Any]:
    """The config.json of the head's files."""
    layers = layer_values(
        target, num_layers=head.num_layers, intermediate_size=head.intermediate_size, rope_theta=head.rope_theta
    )
    return layers | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": False}


def read_back(head: EagleHead, target: ModelConfig) -> EagleConfig:
    """The head's config as its own files will be read."""
    D = target.hidden_size
    config = head_config("eagle", hf_config(head, target), {"fc.weight": (D, 2 * D)}, target)
    assert isinstance(config, EagleConfig)
    return config


def eagle(head: EagleHead, target: FrozenTarget, target_weights: Any, *, dtype: str, seed: int) -> Trainer:
    """A trainer of an EAGLE head.

    Args:
        dtype: of products' operands.
        seed: of random weights.
    """
    config = read_back(head, target.config)
    specs = eagle_head.specs(config, jnp.dtype(dtype))
    model = config.model

    def loss(params, frozen, batch: Batch):
        weights = as_specs_say(params, specs) | {"embed": frozen["target"]["embed"]}
        hidden_BTD = batch.hidden_BTD.astype(jnp.float32)
        B, T = batch.token_ids_BT.shape
        pool: Any = new_chains(model.num_layers, (B, T, *model.cache_heads))
        state_BTD, guesses = hidden_BTD, []
        for k in range(head.num_steps):
            tokens = whole_rows(shifted(batch.token_ids_BT, 1 + k), offset=k)
            _, state_BTD, pool = eagle_head.forward(weights, config, tokens, state_BTD, pool)
            pool = next_pass(pool)
            compare = jax.checkpoint(functools.partial(_compare, target, head.token_weight))
            loss_BT, is_right_BT = compare(frozen["target"], state_BTD, shifted(hidden_BTD, 1 + k))
            guesses.append(Guess(loss_BT, is_right_BT, is_answer(batch, 2 + k)))
        return total(guesses, head.step_decay)

    table = eagle_head.name_table(config, ())
    export = exporter(hf_config(head, target.config), specs, table, dtype, rows=fused_rows(model))

    def init(sample: Batch):
        del sample
        return random_params(specs, seed)

    return Trainer(init, loss, export, {"target": target_weights}, head.num_steps, "eagle", head.num_steps)


def _compare(target: FrozenTarget, token_weight: float, frozen, state_BTD, hidden_BTD) -> tuple[jax.Array, jax.Array]:
    """(loss_BT, is_right_BT); no logits are kept for the gradient."""
    apart_BTD = jnp.abs(state_BTD - hidden_BTD)
    smooth_BTD = jnp.where(apart_BTD < 1, 0.5 * jnp.square(apart_BTD), apart_BTD - 0.5)
    loss_BT, is_right_BT = taught(target.logits(frozen, state_BTD), target.logits(frozen, hidden_BTD))
    return jnp.mean(smooth_BTD, axis=-1) + token_weight * loss_BT, is_right_BT
