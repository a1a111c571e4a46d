"""Device. What a trainer is, and the losses and counts that trainers share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.models.base import random_weights
from jaxspec.train.batches import Batch
from jaxspec.types import ArraySpec

Params = Any  # what is trained: a tree of f32 arrays, shaped as the drafter's specs
Frozen = Any  # what is not: {"target": the target's weights, ...}


@struct.dataclass
class Metrics:
    """Sums over a batch, one entry a place ahead: the k-th guess of a chain. They add up over batches."""

    loss_K: jax.Array  # f32, cross-entropy
    num_taught_K: jax.Array  # f32, guesses that loss was taken on
    num_asked_K: jax.Array  # f32, guesses of tokens of an answer
    num_right_K: jax.Array  # f32, of those asked: the guess is the target's likeliest token
    num_kept_K: jax.Array  # f32, of those asked: so are the guesses before it


class Trainer(NamedTuple):
    """One drafter in training.

    init(sample) -> params, before the first step; sample is a batch of the corpus, for what is fitted to it.
    loss(params, frozen, batch) -> (f32[], Metrics): what the gradient is taken of. aux_streams: what of the target's
    the batch holds.
    export(params, folder): the finished drafter's files. num_ahead: guesses a chain, the length of Metrics' arrays.
    method, num_drafts: what `speculative_config` says to run it.
    """

    init: Callable[[Batch], Params]
    loss: Callable[[Params, Frozen, Batch], tuple[jax.Array, Metrics]]
    export: Callable[[Params, Path], None]
    frozen: Frozen
    num_ahead: int
    method: str
    num_drafts: int
    aux_streams: tuple[int, ...] = ()


def shifted(x_BTX: jax.Array, by: int) -> jax.Array:
    """x at t + by, zeros past the end."""
    T = x_BTX.shape[1]
    return jnp.pad(x_BTX[:, by:], ((0, 0), (0, min(by, T)), *[(0, 0)] * (x_BTX.ndim - 2)))


def is_answer(batch: Batch, ahead: int) -> jax.Array:
    """bool[B, T]: the token at t + ahead belongs to the answer."""
    place_BT = jnp.arange(batch.token_ids_BT.shape[1], dtype=jnp.int32)[None] + ahead
    return (place_BT >= batch.num_prompt_B[:, None]) & (place_BT < batch.len_B[:, None])


def target_ids_of(ids_V: jax.Array | None, logits_BTV: jax.Array) -> jax.Array:
    """i32[B, T]: the likeliest token of logits over the tokens ids_V; None: over all."""
    best_BT = jnp.argmax(logits_BTV, axis=-1).astype(jnp.int32)
    return best_BT if ids_V is None else ids_V[best_BT]


def is_among(ids_V: jax.Array | None, token_BT: jax.Array) -> jax.Array:
    """bool[B, T]: the token is one of ids_V, which ascend; None: of all."""
    if ids_V is None:
        return jnp.ones_like(token_BT, bool)
    return ids_V[jnp.minimum(jnp.searchsorted(ids_V, token_BT), len(ids_V) - 1)] == token_BT


def soft_cross_entropy(logits_BTV: jax.Array, teacher_BTV: jax.Array) -> jax.Array:
    """f32[B, T]: of the teacher's distribution, at temperature 1, under the student's. KL but for a constant."""
    prob_teacher = jax.nn.softmax(teacher_BTV, axis=-1)
    return -jnp.sum(prob_teacher * jax.nn.log_softmax(logits_BTV, axis=-1), axis=-1)


def taught(logits_BTV: jax.Array, teacher_BTV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(loss_BT, is_right_BT) of guesses beside the target's own logits, which no gradient enters."""
    teacher_BTV = jax.lax.stop_gradient(teacher_BTV)
    is_right_BT = jnp.argmax(logits_BTV, axis=-1) == jnp.argmax(teacher_BTV, axis=-1)
    return soft_cross_entropy(logits_BTV, teacher_BTV), is_right_BT


class Guess(NamedTuple):
    """The k-th guesses of all chains, as a trainer compares them."""

    loss_BT: jax.Array  # f32
    is_right_BT: jax.Array  # bool
    is_asked_BT: jax.Array  # bool
    is_taught_BT: jax.Array | None = None  # bool, subset of asked; None: all of them


def total(guesses: list[Guess], decay: float) -> tuple[jax.Array, Metrics]:
    """(sum over k of decay^k times the mean loss of the k-th guesses, the counts)."""
    loss, columns = jnp.float32(0), []
    is_alive_BT = jnp.ones_like(guesses[0].is_right_BT)
    for k, guess in enumerate(guesses):
        is_taught_BT = guess.is_asked_BT if guess.is_taught_BT is None else guess.is_taught_BT
        weight_BT = is_taught_BT.astype(jnp.float32)
        loss_sum, num_taught = jnp.sum(guess.loss_BT * weight_BT), jnp.sum(weight_BT)
        loss = loss + decay**k * loss_sum / jnp.maximum(num_taught, 1.0)
        is_alive_BT &= guess.is_right_BT
        counts = [
            jnp.sum(x.astype(jnp.float32))
            for x in (
                guess.is_asked_BT,
                guess.is_right_BT & guess.is_asked_BT,
                is_alive_BT & guess.is_asked_BT,
            )
        ]
        columns.append([loss_sum, num_taught, *counts])
    sums = [jnp.stack(column) for column in zip(*columns, strict=True)]
    return loss, jax.lax.stop_gradient(Metrics(*sums))


def random_params(specs: Any, seed: int) -> Params:
    """Random parameters, f32 as what is trained is."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), random_weights(specs, seed))


def as_specs_say(params: Params, specs: Any) -> Params:
    """Each parameter in its spec's dtype, as the drafter runs."""
    return jax.tree.map(lambda array, spec: array.astype(spec.dtype), params, specs)


def is_spec(leaf: Any) -> bool:
    """For `jax.tree.map` over specs."""
    return isinstance(leaf, ArraySpec)
