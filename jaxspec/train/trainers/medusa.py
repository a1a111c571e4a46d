"""Device. Medusa's heads over the target's own vocabulary head, taught the target's distributions.

Head k reads the state at t and guesses the token at t + 2 + k. Blocks begin at zero, so that every head begins as the
target's next-token guess. Source: Cai et al. 2024, section 2.2.1 (Medusa-1, with soft labels).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config.heads import MedusaConfig
from jaxspec.models.heads import medusa as medusa_head
from jaxspec.train.batches import Batch
from jaxspec.train.config import MedusaHead
from jaxspec.train.export import exporter
from jaxspec.train.target import FrozenTarget
from jaxspec.train.trainers.base import (
    Guess,
    Trainer,
    as_specs_say,
    is_answer,
    is_spec,
    shifted,
    taught,
    total,
)


def medusa(head: MedusaHead, target: FrozenTarget, target_weights: Any, *, dtype: str) -> Trainer:
    """A trainer of Medusa heads."""
    config = MedusaConfig(
        num_heads=head.num_heads,
        num_blocks=head.num_blocks,
        hidden_size=target.config.hidden_size,
        draft_vocab_size=target.config.vocab_size,
        has_bias=True,
        own_heads="none",
    )
    specs = medusa_head.specs(config, jnp.dtype(dtype))

    def loss(params, frozen, batch: Batch):
        weights = as_specs_say(params, specs)
        hidden_BTD, _ = target.see(frozen["target"], batch.token_ids_BT)
        B, T, D = hidden_BTD.shape
        hidden_NKD = medusa_head.blocks(weights, config, hidden_BTD.reshape(B * T, D), head.num_heads)
        guesses = []
        for k in range(head.num_heads):
            own_BTD = hidden_NKD[:, k].reshape(B, T, D)
            compare = jax.checkpoint(functools.partial(_compare, target))
            loss_BT, is_right_BT = compare(frozen["target"], own_BTD, shifted(hidden_BTD, 1 + k))
            guesses.append(Guess(loss_BT, is_right_BT, is_answer(batch, 2 + k)))
        return total(guesses, head.head_decay)

    def init():
        return jax.tree.map(lambda spec: jnp.zeros(spec.shape, jnp.float32), specs, is_leaf=is_spec)

    values = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": head.num_heads,
        "medusa_num_layers": head.num_blocks,
        "hidden_size": config.hidden_size,
        "vocab_size": config.draft_vocab_size,
    }
    export = exporter(values, specs, medusa_head.name_table(config, ()), dtype)
    return Trainer(init, loss, export, {"target": target_weights}, head.num_heads, "medusa", head.num_heads)


def _compare(target: FrozenTarget, frozen, own_BTD, hidden_BTD) -> tuple[jax.Array, jax.Array]:
    """(loss_BT, is_right_BT); neither side's logits are kept for the gradient."""
    return taught(target.logits(frozen, own_BTD), target.logits(frozen, hidden_BTD))
