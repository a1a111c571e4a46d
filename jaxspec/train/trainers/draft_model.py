"""Device. Distillation: a smaller Llama learns the target's distribution of each next token of its answers.

Guess 0 at t is of the token at t + 1, from the tokens up to t. Source: Zhou et al. 2024 (DistillSpec), section 3, the
forward KL over answers that the target drew.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import ConfigError
from jaxspec.models import llama
from jaxspec.models.base import random_weights
from jaxspec.models.chains import new_chains
from jaxspec.train.batches import Batch
from jaxspec.train.config import DraftModelHead
from jaxspec.train.export import pieces, write_drafter
from jaxspec.train.target import FrozenTarget, whole_rows
from jaxspec.train.trainers.base import Guess, Trainer, as_specs_say, is_answer, taught, total
from jaxspec.train.trainers.layers import fused_rows
from jaxspec.weights.export_config import hf_configs

NUM_DRAFTS = 4  # what the finished model is asked for; it was not trained for any number


def draft_model(head: DraftModelHead, target: FrozenTarget, target_weights: Any, *, dtype: str, seed: int) -> Trainer:
    """A trainer of a Llama-shaped draft model that begins as some of the target's layers.

    Raises: ConfigError for a target of another family.
    """
    if target.config.family != "llama":
        raise ConfigError(f"draft_model needs a target of family llama, got {target.config.family}; take eagle3")
    n, num = target.config.num_layers, min(head.num_layers, target.config.num_layers)
    picked = np.unique(np.round(np.linspace(0, n - 1, num)).astype(int)).tolist()
    config = target.config.model_copy(
        update={
            "num_layers": len(picked),
            "sliding_window_layers": tuple(target.config.sliding_window_layers[i] for i in picked),
        }
    )
    specs = llama.FAMILY.specs(config, jnp.dtype(dtype))

    def loss(params, frozen, batch: Batch):
        weights = as_specs_say(params, specs)
        hidden_BTD = batch.hidden_BTD.astype(jnp.float32)
        own_BTD, _ = llama.FAMILY.forward(
            weights, config, whole_rows(batch.token_ids_BT), new_chains(config.num_layers)
        )
        compare = jax.checkpoint(functools.partial(_compare, config, target))
        loss_BT, is_right_BT = compare(weights, frozen["target"], own_BTD, hidden_BTD)
        return total([Guess(loss_BT, is_right_BT, is_answer(batch, 1))], 1.0)

    def init(sample: Batch):
        del sample
        picked_weights = target_weights | {"layers": [target_weights["layers"][i] for i in picked]}
        fresh = random_weights(specs, seed)
        return jax.tree.map(lambda own, like: jnp.array(like if like is not None else own, jnp.float32),
                            fresh, picked_weights)  # fmt: skip

    def export(params, folder: Path) -> None:
        table = llama.name_table(config, "hf")
        rows = fused_rows(config)
        tensors = pieces(params, specs, table, rows | {"qkv_bias": rows["qkv"]})
        shapes: Any = dict.fromkeys(tensors)
        values, _ = hf_configs(config.model_copy(update={"dtype": dtype}), shapes)
        write_drafter(folder, values, tensors, dtype)

    return Trainer(init, loss, export, {"target": target_weights}, 1, "draft_model", NUM_DRAFTS)


def _compare(config, target: FrozenTarget, own, frozen, own_BTD, hidden_BTD) -> tuple[jax.Array, jax.Array]:
    """(loss_BT, is_right_BT); neither side's logits are kept for the gradient."""
    return taught(llama.FAMILY.logits(own, config, own_BTD), target.logits(frozen, hidden_BTD))
