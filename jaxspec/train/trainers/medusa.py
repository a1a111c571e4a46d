"""Device. Medusa's heads over the target's own vocabulary head, taught the target's distributions.

Head k reads the state at t and guesses the token at t + 2 + k. Blocks begin at zero, so that every head begins as the
target's next-token guess. Source: Cai et al. 2024, section 2.2.1 (Medusa-1, with soft labels).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
    is_among,
    is_answer,
    is_spec,
    shifted,
    soft_cross_entropy,
    target_ids_of,
    total,
)


def medusa(
    head: MedusaHead, target: FrozenTarget, target_weights: Any, target_ids: np.ndarray | None, *, dtype: str
) -> Trainer:
    """A trainer of Medusa heads; loss is taken over the tokens target_ids, None: over all."""
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
        hidden_BTD = batch.hidden_BTD.astype(jnp.float32)
        ids_V = frozen["target_ids_V"]
        B, T, D = hidden_BTD.shape
        hidden_NKD = medusa_head.blocks(weights, config, hidden_BTD.reshape(B * T, D), head.num_heads)
        guesses = []
        for k in range(head.num_heads):
            own_BTD = hidden_NKD[:, k].reshape(B, T, D)
            compare = jax.checkpoint(functools.partial(_compare, target))
            loss_BT, drafted_BT = compare(frozen["teacher"], ids_V, own_BTD, shifted(hidden_BTD, 1 + k))
            best_BT, asked_BT = shifted(batch.best_BT, 1 + k), is_answer(batch, 2 + k)
            guesses.append(Guess(loss_BT, drafted_BT == best_BT, asked_BT, asked_BT & is_among(ids_V, best_BT)))
        return total(guesses, head.head_decay)

    def init(sample: Batch):
        del sample
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
    teacher = target.with_tokens(target_weights, target_ids)
    ids_V = None if target_ids is None else jnp.asarray(target_ids)
    frozen = {"target": target_weights, "teacher": teacher, "target_ids_V": ids_V}
    return Trainer(init, loss, export, frozen, head.num_heads, "medusa", head.num_heads)


def _compare(target: FrozenTarget, frozen, ids_V, own_BTD, hidden_BTD) -> tuple[jax.Array, jax.Array]:
    """(loss_BT, drafted_BT, the token); nobody's logits are kept for the gradient."""
    teacher_BTV = jax.lax.stop_gradient(target.logits(frozen, hidden_BTD))
    logits_BTV = target.logits(frozen, own_BTD)
    return soft_cross_entropy(logits_BTV, teacher_BTV), target_ids_of(ids_V, logits_BTV)
