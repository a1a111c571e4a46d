"""Device. What a head that drafts token by token is, and the parts such heads share."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.config.hf_eagle import canonical
from jaxspec.models.base import Tokens, Weights
from jaxspec.models.layers import linear
from jaxspec.types import Pool
from jaxspec.weights.names import NameTable, TensorSource


class RecurrentHead(NamedTuple):
    """A head whose entry at position t is made of the token at t + 1 and of a state: the target's at t where it is
    known, and beyond that the head's own of the entry before. What it says of t is about the token at t + 2.

    specs(config, dtype) -> tree of ArraySpec, of what the files hold.
    name_table(config, tensor_names) -> NameTable.
    features(weights, config, seen_BTX) -> features_BTD: the target's hidden state or streams as the head's layers take
        them in.
    forward(weights, config, tokens, features_BTD, pool) -> (hidden_BTD, state_BTD, pool); token_ids_BT are the tokens
        after the positions. hidden is what the vocabulary head reads, state the next entry's features.

    The tree that runs also holds "embed", the target's table where the files have none; `head_logits` reads "head".
    """

    specs: Callable[[Any, Any], Any]
    name_table: Callable[[Any, Collection[str]], NameTable]
    features: Callable[[Weights, Any, jax.Array], jax.Array]
    forward: Callable[[Weights, Any, Tokens, jax.Array, Pool], tuple[jax.Array, jax.Array, Pool]]


def as_they_are(weights: Weights, config: Any, seen_BTX: jax.Array) -> jax.Array:
    """Features of a head that reads the target's states themselves."""
    del weights, config
    return seen_BTX


def head_logits(head_VD: jax.Array, hidden_BTD: jax.Array, scale: float = 1.0) -> jax.Array:
    """logits_BTV f32 of a head of its own."""
    B, T, D = hidden_BTD.shape
    logits = linear(hidden_BTD.reshape(B * T, D), head_VD).reshape(B, T, -1)
    return logits if scale == 1.0 else logits * scale


def joined(a_BTD: jax.Array, b_BTD: jax.Array) -> jax.Array:
    """Two states side by side, one row a token: [B * T, 2D]."""
    both = jnp.concatenate([a_BTD, b_BTD], axis=-1)
    return both.reshape(-1, both.shape[-1])


def file_names(tensor_names: Collection[str]) -> Mapping[str, str]:
    """{canonical name: name in the file}."""
    return {canonical(name): name for name in tensor_names}


def renamed(source: TensorSource, names: Mapping[str, str], prefix: str = "") -> TensorSource:
    """The source with the file's own names; a name that the file has not stays, to be reported as missing."""
    stored = tuple(names.get(prefix + name, prefix + name) for name in source.names)
    return TensorSource(stored, source.transforms)
