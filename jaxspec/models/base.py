"""Device. What a target family is: pure functions over a weight pytree, and the cache it reads and writes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct

from jaxspec.config.model import ModelConfig
from jaxspec.models.rope import Rotation
from jaxspec.types import ArraySpec, Pool
from jaxspec.weights.names import NameTable

Weights = Any  # a nested dict / list of arrays, shaped as Family.specs says


@struct.dataclass
class Tokens:
    """The tokens of one forward pass, T a row, and where their keys and values go.

    A padded entry has position -1 and slot -1: it writes nothing and its hidden state is meaningless (but finite).
    """

    token_ids_BT: jax.Array  # i32, in [0, V)
    positions_BT: jax.Array  # i32, absolute; -1 = padding
    slots_BT: jax.Array  # i32, page * S + offset; -1 = write nothing
    pages_BM: jax.Array  # i32, the row's pages in order; -1 = none


@struct.dataclass
class Place:
    """Where one layer finds the tokens of a pass."""

    tokens: Tokens
    page_offset: jax.Array  # i32[]: the layer's first page in the pool
    rotation: Rotation | None = None  # None: the layer turns nothing


class Family(NamedTuple):
    """The functions of one model family.

    specs(config, dtype) -> tree of ArraySpec; the weights have its structure.
    name_table(config, source) -> NameTable for source "hf" or "gguf".
    forward(weights, config, tokens, pool, aux_streams=()) -> (hidden_BTD after the final norm f32, pool); pool is
        shaped as `jaxspec.cache.pages.pool_shape` says, one cache kind a family. Behind the hidden state, along its
        last axis, stand the residual streams asked for, in that order: stream i is what enters layer i, stream L what
        leaves the last. Weights whose "layers" are the first few run those alone, over their pages of the same pool.
    logits(weights, config, hidden_BTD) -> logits_BTV f32.
    int8_names: last words of the paths of parameters that only `linear` reads, which may then be `Int8Weight`s;
        none means that the family has no int8 form.
    """

    specs: Callable[[ModelConfig, Any], Any]
    name_table: Callable[[ModelConfig, str], NameTable]
    forward: Callable[..., tuple[jax.Array, Pool]]
    logits: Callable[[Weights, ModelConfig, jax.Array], jax.Array]
    int8_names: tuple[str, ...] = ()


def at_highest_precision(family: Family) -> Family:
    """The family with float32 products computed as such; accelerators round their operands otherwise."""

    def forward(weights: Weights, config: ModelConfig, tokens: Tokens, pool: Pool, aux_streams: tuple[int, ...] = ()):
        with jax.default_matmul_precision("highest"):
            return family.forward(weights, config, tokens, pool, aux_streams)

    def logits(weights: Weights, config: ModelConfig, hidden_BTD: jax.Array):
        with jax.default_matmul_precision("highest"):
            return family.logits(weights, config, hidden_BTD)

    return family._replace(forward=forward, logits=logits)


def random_weights(specs: Any, seed: int) -> Weights:
    """Random weights of the given specs, made on the host: normal with the spec's scale, ones where it is 0."""
    rng = np.random.default_rng(seed)

    def make(spec: ArraySpec) -> jax.Array:
        if spec.init_scale == 0.0:
            return jax.device_put(np.ones(spec.shape, spec.dtype))
        values = rng.standard_normal(spec.shape, np.float32) * np.float32(spec.init_scale)
        return jax.device_put(values.astype(spec.dtype))

    return jax.tree.map(make, specs, is_leaf=lambda leaf: isinstance(leaf, ArraySpec))
