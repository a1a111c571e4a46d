"""Device. The MLP speculator: a recurrence from the target's state over the text's own tokens.

Step k of chain t reads the state of step k - 1 (the target's at t for k = 0) and the token at t + 1 + k, and is taught
the target's distribution of the token at t + 2 + k. Source: Wertheimer et al. 2024, section 3, with soft targets in
place of the text's own tokens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config.heads import MlpSpeculatorConfig
from jaxspec.models.heads import mlp_speculator as speculator
from jaxspec.train.batches import Batch
from jaxspec.train.config import MlpSpeculatorHead
from jaxspec.train.export import exporter
from jaxspec.train.target import FrozenTarget
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


def mlp_speculator(
    head: MlpSpeculatorHead, target: FrozenTarget, target_weights: Any, *, dtype: str, seed: int
) -> Trainer:
    """A trainer of an MLP speculator.

    Args:
        dtype: of products' operands.
        seed: of random weights.
    """
    config = MlpSpeculatorConfig(
        hidden_size=target.config.hidden_size,
        inner_size=head.inner_size or target.config.hidden_size,
        num_steps=head.num_steps,
        vocab_size=target.config.vocab_size,
        is_tied=head.tie_weights,
        scale_input=head.scale_input,
    )
    specs = speculator.specs(config, jnp.dtype(dtype))

    def loss(params, frozen, batch: Batch):
        weights = as_specs_say(params, specs)
        hidden_BTD = batch.hidden_BTD.astype(jnp.float32)
        B, T, D = hidden_BTD.shape
        state_NX, guesses = speculator.start(config, hidden_BTD.reshape(B * T, D)), []
        for k in range(config.num_steps):
            advance = jax.checkpoint(functools.partial(_advance, config, target, k))
            token_N = shifted(batch.token_ids_BT, 1 + k).reshape(B * T)
            teacher_ND = shifted(hidden_BTD, 1 + k).reshape(B * T, D)
            state_NX, loss_N, is_right_N = advance(weights, frozen["target"], state_NX, token_N, teacher_ND)
            guesses.append(Guess(loss_N.reshape(B, T), is_right_N.reshape(B, T), is_answer(batch, 2 + k)))
        return total(guesses, head.step_decay)

    values = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": config.hidden_size,
        "inner_dim": config.inner_size,
        "vocab_size": config.vocab_size,
        "n_predict": config.num_steps,
        "tie_weights": config.is_tied,
        "scale_input": config.scale_input,
    }
    export = exporter(values, specs, speculator.name_table(config, ()), dtype)

    def init(sample: Batch):
        del sample
        return random_params(specs, seed)

    frozen = {"target": target_weights}
    return Trainer(init, loss, export, frozen, head.num_steps, "mlp_speculator", head.num_steps)


def _advance(
    config: MlpSpeculatorConfig, target: FrozenTarget, index: int, weights, frozen, state_NX, token_N, teacher_ND
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(state_NF, loss_N, is_right_N) of a step; no logits are kept for the gradient."""
    state_NF, logits_NV = speculator.step(weights, config, index, state_NX, token_N)
    return state_NF, *taught(logits_NV, target.logits(frozen, teacher_ND[None])[0])
