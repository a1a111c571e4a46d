"""Device. What a program does where it is one of several that hold a shard each: sums and maxima over all of them, and
the stretch of the vocabulary that is its own.

Which values differ from shard to shard is part of their type under `jax.shard_map`, and goes by what they are made
of. So nobody says whether a weight is split or not: a product over a split axis is summed, anything else is left
alone, and in a program of one device every function here hands back what it was given. JAX refuses a program that
would return as one value what may differ.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

TENSOR = "tensor"  # the mesh's axis that heads, feed-forward widths, experts and the vocabulary are split along
DATA = "data"  # its axis of groups, each with the whole model, and rows and pages of its own; no function asks for it

_NO_ID = 2**31 - 1


def num_shards() -> int:
    """Programs that run side by side along the tensor axis; 1 outside of a mesh."""
    return jax.lax.axis_size(TENSOR) if TENSOR in jax.sharding.get_abstract_mesh().manual_axes else 1


def is_split(x: Any) -> bool:
    """Whether the value may differ from shard to shard."""
    kind = jax.typeof(x)
    varying = getattr(kind, "vma", None)
    return TENSOR in (kind.manual_axis_type.varying if varying is None else varying)


def split(tree: Any) -> Any:
    """The same values, of the type of those that differ from shard to shard: what a loop over such is to begin with."""
    if num_shards() == 1:
        return tree
    return jax.tree.map(lambda x: x if is_split(x) else jax.lax.pcast(x, TENSOR, to="varying"), tree)


def split_like(tree: Any, *others: jax.Array) -> Any:
    """`split`, where one of the others differs from shard to shard."""
    return split(tree) if any(map(is_split, others)) else tree


def summed(x: jax.Array) -> jax.Array:
    """The sum over the shards."""
    return jax.lax.psum(x, TENSOR) if is_split(x) else x


def largest(x: jax.Array) -> jax.Array:
    """The maximum over the shards."""
    return jax.lax.pmax(x, TENSOR) if is_split(x) else x


def smallest(x: jax.Array) -> jax.Array:
    """The minimum over the shards."""
    return jax.lax.pmin(x, TENSOR) if is_split(x) else x


def first_best(score: jax.Array, ids: jax.Array) -> jax.Array:
    """The smallest id with the largest score, of the one that each shard has found."""
    return smallest(jnp.where(score == largest(score), ids, _NO_ID)) if is_split(score) else ids


def size_of_part(size: int) -> int:
    """Entries of an axis of this size that a shard holds; the last shard's may reach beyond the axis."""
    return -(-size // num_shards())


def whole_size(x_XV: jax.Array, axis: int = -1) -> int:
    """The length of the axis that is split, the last by default, over all shards, padding included."""
    return x_XV.shape[axis] * num_shards() if is_split(x_XV) else x_XV.shape[axis]


def first_id(x_XV: jax.Array) -> jax.Array | int:
    """Where the last axis begins: the id of its first entry."""
    return jax.lax.axis_index(TENSOR) * x_XV.shape[-1] if is_split(x_XV) else 0


def ids_of(x_XV: jax.Array) -> jax.Array:
    """i32[V], the ids of the last axis."""
    return jnp.arange(x_XV.shape[-1], dtype=jnp.int32) + first_id(x_XV)


def own_ids(ids: jax.Array, x_XV: jax.Array) -> jax.Array:
    """Ids counted from the shard's first; the axis' length, past its end, where another shard holds them."""
    if not is_split(x_XV):
        return ids
    own = ids - first_id(x_XV)
    return jnp.where((own >= 0) & (own < x_XV.shape[-1]), own, x_XV.shape[-1])


def entries(x_RV: jax.Array, ids_RX: jax.Array) -> jax.Array:
    """The entries at ids of the last axis, whichever shard holds them: [R, X]."""
    if not is_split(x_RV):
        return jnp.take_along_axis(x_RV, ids_RX, axis=-1)
    own_RX = own_ids(ids_RX, x_RV)
    found_RX = jnp.take_along_axis(x_RV, jnp.minimum(own_RX, x_RV.shape[-1] - 1), axis=-1)
    return summed(jnp.where(own_RX < x_RV.shape[-1], found_RX, jnp.zeros((), x_RV.dtype)))


def picked(x_RV: jax.Array, rows_X: jax.Array, ids_X: jax.Array) -> jax.Array:
    """The entries of rows at ids of the last axis, whichever shard holds them."""
    own_X = own_ids(ids_X, x_RV)
    if not is_split(x_RV):
        return x_RV[rows_X, own_X]
    found_X = x_RV[rows_X, jnp.minimum(own_X, x_RV.shape[1] - 1)]
    return summed(jnp.where(own_X < x_RV.shape[1], found_X, jnp.zeros((), x_RV.dtype)))


def result(shape: tuple[int, ...], dtype: Any, *operands: jax.Array) -> jax.ShapeDtypeStruct:
    """What a kernel over these operands gives; on a mesh its type says that it may differ from shard to shard."""
    if num_shards() == 1:
        return jax.ShapeDtypeStruct(shape, dtype)
    kind = jax.typeof(next(filter(is_split, operands), operands[0]))
    name = "vma" if hasattr(kind, "vma") else "manual_axis_type"
    return jax.ShapeDtypeStruct(shape, dtype, **{name: getattr(kind, name)})


def side_by_side(x_RX: jax.Array) -> jax.Array:
    """Every shard's few values along the last axis, in the shards' order: [R, shards * X]."""
    place_n = jnp.arange(num_shards(), dtype=jnp.int32)
    is_own = (place_n == jax.lax.axis_index(TENSOR)).reshape((1,) * (x_RX.ndim - 1) + (-1, 1))
    placed = summed(jnp.where(is_own, x_RX[..., None, :], jnp.zeros((), x_RX.dtype)))
    return placed.reshape(*x_RX.shape[:-1], -1)


def vocabulary_part(logits_XV: jax.Array) -> jax.Array:
    """The shard's stretch of logits that all shards have whole; -inf beyond the vocabulary. What is split stays."""
    if num_shards() == 1 or is_split(logits_XV):
        return logits_XV
    size = size_of_part(logits_XV.shape[-1])
    padding = size * num_shards() - logits_XV.shape[-1]
    padded = jnp.pad(logits_XV, [(0, 0)] * (logits_XV.ndim - 1) + [(0, padding)], constant_values=-math.inf)
    start = jax.lax.axis_index(TENSOR) * size
    return jax.lax.dynamic_slice_in_dim(split(padded), start, size, axis=-1)
