"""Device. The frozen target: what it says and thinks of whole conversations, in one pass without a cache."""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.models.base import Family, Tokens, Weights
from jaxspec.models.chains import new_chains
from jaxspec.models.registry import family_of
from jaxspec.weights.aliases import resolve_model
from jaxspec.weights.checkpoint import Checkpoint, open_checkpoint
from jaxspec.weights.load import load


@dataclass(frozen=True)
class FrozenTarget:
    """The target's functions; its weights travel as arguments."""

    config: ModelConfig
    family: Family
    path: Path

    def see(
        self, weights: Weights, token_ids_BT: jax.Array, aux_streams: tuple[int, ...] = ()
    ) -> tuple[jax.Array, jax.Array]:
        """(hidden_BTD after the final norm, streams_BTX side by side)."""
        seen_BTX, _ = self.family.forward(
            weights, self.config, whole_rows(token_ids_BT), new_chains(self.config.num_layers), aux_streams
        )
        seen_BTX = jax.lax.stop_gradient(seen_BTX)
        return seen_BTX[..., : self.config.hidden_size], seen_BTX[..., self.config.hidden_size :]

    def logits(self, weights: Weights, hidden_BTD: jax.Array) -> jax.Array:
        """logits_BTV f32, of the tokens that the weights' head has; a gradient flows through the hidden state."""
        return self.family.logits(weights, self.config, hidden_BTD)

    def with_tokens(self, weights: Weights, ids_V: np.ndarray | None) -> Weights:
        """The weights with a vocabulary head of these tokens alone; None: all."""
        if ids_V is None:
            return weights
        head = {"embed" if self.config.tie_word_embeddings else "head", "head_bias"} & weights.keys()
        return weights | {name: weights[name][ids_V] for name in head}


def whole_rows(token_ids_BT: jax.Array, offset: int = 0) -> Tokens:
    """Tokens at positions offset, offset + 1, ..., without pages: for a `ChainPool`."""
    B, T = token_ids_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None] + offset, (B, T))
    nothing_BT = jnp.full((B, T), -1, jnp.int32)
    return Tokens(token_ids_BT, positions_BT, slots_BT=nothing_BT, pages_BM=nothing_BT[:, :1])


def open_target(model: str, dtype: str) -> tuple[FrozenTarget, Weights]:
    """The target and its weights, in the dtype that products are taken in.

    Raises: ConfigError, WeightsError.
    """
    with open_checkpoint(resolve_model(model)) as checkpoint:
        return load_target(checkpoint, dtype)


def load_target(checkpoint: Checkpoint, dtype: str) -> tuple[FrozenTarget, Weights]:
    """As `open_target`, of an open checkpoint."""
    config = checkpoint.config
    family = family_of(config.family)
    specs = family.specs(config, jnp.dtype(dtype))
    weights = load(checkpoint.reader, specs, family.name_table(config, checkpoint.source))
    return FrozenTarget(config, family, checkpoint.path), weights
