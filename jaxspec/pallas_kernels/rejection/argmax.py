"""Device. The first largest entry of each row of the vocabulary, plain or with Gumbel noise, cheap on every backend.

NOTE: XLA lowers `jnp.argmax` to a two-value reduction that its CPU backend does not vectorise (25 times slower than a
maximum over [40, 49152]), with all fused noise evaluated inside. So: the maximum of every block of lanes, the first
best block, then the scores of that one block again; and where a maximum is looked up, by comparing with it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

from jaxspec.keys import gumbel

_BLOCK = 128


def row_argmax(logits_RV: Float[Array, "R V"]) -> Int32[Array, " R"]:
    """The first id with the largest logit. NaN never wins; a row of nothing else gives id 0."""

    def scores(ids_RC: jax.Array | None) -> jax.Array:
        return _without_nan(_columns(logits_RV, ids_RC))

    return _block_argmax(scores, logits_RV.shape[-1])


def row_gumbel_argmax(
    logits_RV: Float[Array, "R V"], key_R2: UInt32[Array, "R 2"], is_noised_R: jax.Array | None = None
) -> Int32[Array, " R"]:
    """A draw from softmax(logits) in each row: argmax(logits + gumbel(key, id)).

    Rows where is_noised_R (bool[R]) is false get the plain argmax. None: all rows are drawn.
    """

    def scores(ids_RC: jax.Array | None) -> jax.Array:
        x = _without_nan(_columns(logits_RV, ids_RC))
        ids = jnp.arange(logits_RV.shape[-1], dtype=jnp.int32)[None] if ids_RC is None else ids_RC
        noise = gumbel(key_R2, ids)
        return x + (noise if is_noised_R is None else jnp.where(is_noised_R[:, None], noise, jnp.float32(0)))

    return _block_argmax(scores, logits_RV.shape[-1])


def _columns(logits_RV: jax.Array, ids_RC: jax.Array | None) -> jax.Array:
    return logits_RV if ids_RC is None else jnp.take_along_axis(logits_RV, ids_RC, axis=1)


def _without_nan(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(x), -jnp.inf, x)


def _block_argmax(scores: Callable[[jax.Array | None], jax.Array], vocab_size: int) -> jax.Array:
    """argmax over scores(None) [R, V], where scores(ids_RC) gives the same scores at given ids; none is NaN."""
    whole = vocab_size // _BLOCK * _BLOCK
    scores_RV = scores(None)
    if whole == 0:
        return _first_largest(scores_RV)
    num_rows = scores_RV.shape[0]
    best = scores_RV[:, :whole].reshape(num_rows, whole // _BLOCK, _BLOCK).max(axis=-1)
    if whole < vocab_size:
        best = jnp.concatenate([best, scores_RV[:, whole:].max(axis=-1, keepdims=True)], axis=-1)
    # The last window may reach back into the block before it, where every score is then smaller.
    start = jnp.minimum(_first_largest(best) * _BLOCK, vocab_size - _BLOCK)
    ids_RC = start[:, None] + jnp.arange(_BLOCK, dtype=jnp.int32)[None]
    return start + _first_largest(scores(ids_RC))


def _first_largest(x_RC: jax.Array) -> jax.Array:
    places = jnp.arange(x_RC.shape[-1], dtype=jnp.int32)[None]
    is_largest = x_RC == x_RC.max(axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_largest, places, x_RC.shape[-1] - 1), axis=-1)
