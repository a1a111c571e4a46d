"""Device. The first largest entry of each row of the vocabulary, plain or with Gumbel noise, cheap on every backend.

NOTE: XLA lowers `jnp.argmax` to a two-value reduction that its CPU backend does not vectorise (25 times slower than a
maximum over [40, 49152]), with all fused noise evaluated inside. So: the maximum of every block of lanes, the first
best block, then the scores of that one block again; and where a maximum is looked up, by comparing with it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32

from jaxspec import shards
from jaxspec.keys import gumbel
from jaxspec.pallas_kernels.rejection.candidates import Candidates

_BLOCK = 128
_MANY_ROWS = 1280  # more than a batch of 256 with four drafts a row are not gone through one by one
# No noise of `keys.gumbel` is larger: -log(-log u) for the largest u there is, 1 - 2^-24, and some for its rounding.
LARGEST_NOISE = 16.64


def row_argmax(logits_RV: Float[Array, "R V"]) -> Int32[Array, " R"]:
    """The first id with the largest logit. NaN never wins; a row of nothing else gives id 0."""

    def scores(ids_RC: jax.Array | None) -> jax.Array:
        return _without_nan(_columns(logits_RV, ids_RC))

    return _block_argmax(scores, logits_RV)


def row_gumbel_argmax(
    logits_RV: Float[Array, "R V"], key_R2: UInt32[Array, "R 2"], is_noised_R: jax.Array | None = None
) -> Int32[Array, " R"]:
    """A draw from softmax(logits) in each row: argmax(logits + gumbel(key, id)).

    Rows where is_noised_R (bool[R]) is false get the plain argmax. None: all rows are drawn.
    """

    def scores(ids_RC: jax.Array | None) -> jax.Array:
        x = _without_nan(_columns(logits_RV, ids_RC))
        ids = shards.ids_of(logits_RV)[None] if ids_RC is None else ids_RC + shards.first_id(logits_RV)
        noise = gumbel(key_R2, ids)
        return x + (noise if is_noised_R is None else jnp.where(is_noised_R[:, None], noise, jnp.float32(0)))

    return _block_argmax(scores, logits_RV)


def gumbel_argmax_among(
    x_RC: Float[Array, "R C"],
    found: Candidates,
    key_R2: UInt32[Array, "R 2"],
    bound_R: Float[Array, " R"],
    is_noised_R: jax.Array | None = None,
) -> tuple[Int32[Array, " R"], jax.Array]:
    """`row_gumbel_argmax` of rows of which only some entries are known, and bool[R], whether it is sure to be that.

    Args:
        x_RC: the entries at found's ids; not NaN.
        bound_R: no entry elsewhere is above it. Rows without noise must have their largest entry among the candidates.
    """
    noise_RC = gumbel(key_R2, found.ids_RC)
    score_RC = x_RC + (noise_RC if is_noised_R is None else jnp.where(is_noised_R[:, None], noise_RC, jnp.float32(0)))
    best_R = shards.largest(score_RC.max(axis=-1))
    # Rounding keeps the order of sums, so no score elsewhere is above this one.
    is_sure_R = (bound_R == -jnp.inf) | (best_R > bound_R + LARGEST_NOISE)
    if is_noised_R is not None:
        is_sure_R = is_sure_R | ~is_noised_R
    return argmax_among(score_RC, found), is_sure_R


def finish_rows(
    among_R: Int32[Array, " R"], is_sure_R: jax.Array, draw: Callable[[jax.Array], jax.Array]
) -> Int32[Array, " R"]:
    """What was found among candidates where that is sure; elsewhere draw(row), which looks at all of the row."""

    num_rows = among_R.shape[0]
    if num_rows > _MANY_ROWS:
        return jnp.where(is_sure_R, among_R, jax.vmap(draw)(jnp.arange(num_rows, dtype=jnp.int32)))

    def finish(row: jax.Array, id_R: jax.Array) -> jax.Array:
        return lax.cond(is_sure_R[row], lambda id_R: id_R, lambda id_R: id_R.at[row].set(draw(row)), id_R)

    loop = lambda: lax.fori_loop(0, num_rows, finish, among_R)  # noqa: E731
    return lax.cond(jnp.all(is_sure_R), lambda: among_R, loop)


def gumbel_argmax(
    logits_V: Float[Array, " V"], key_2: UInt32[Array, " 2"], is_noised: jax.Array | bool = True
) -> Int32[Array, ""]:
    """`row_gumbel_argmax` of one row, which is smaller code, and whose cores share the row."""
    # In rows of lanes: what XLA's CPU backend shares among cores is an array's first axis, and what it adds up or
    # compares lane by lane it vectorises. The barrier keeps the noise out of that.
    lanes = min(_BLOCK, logits_V.shape[0])
    ids = jnp.arange(-(-logits_V.shape[0] // lanes) * lanes, dtype=jnp.int32).reshape(-1, lanes)
    padding = ids.size - logits_V.shape[0]
    ids = ids + shards.first_id(logits_V)
    x = jnp.pad(_without_nan(logits_V), (0, padding), constant_values=-jnp.inf).reshape(ids.shape)
    score = lax.optimization_barrier(x + jnp.where(is_noised, gumbel(key_2[None], ids), jnp.float32(0)))
    best = shards.largest(score.max())
    first = shards.smallest(jnp.min(jnp.where(score == best, ids, jnp.iinfo(jnp.int32).max)))
    return jnp.where(best > -jnp.inf, first, 0)


def argmax_among(score_RC: Float[Array, "R C"], found: Candidates) -> Int32[Array, " R"]:
    """The smallest id with the largest score, 0 where all are -inf; not NaN."""
    best_R = shards.largest(score_RC.max(axis=-1))
    is_best_RC = score_RC == best_R[:, None]
    id_R = shards.smallest(jnp.min(jnp.where(is_best_RC, found.ids_RC, jnp.iinfo(jnp.int32).max), axis=-1))
    return jnp.where(best_R > -jnp.inf, id_R, 0)


def _columns(logits_RV: jax.Array, ids_RC: jax.Array | None) -> jax.Array:
    return logits_RV if ids_RC is None else jnp.take_along_axis(logits_RV, ids_RC, axis=1)


def _without_nan(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(x), -jnp.inf, x)


def _block_argmax(scores: Callable[[jax.Array | None], jax.Array], logits_RV: jax.Array) -> jax.Array:
    """argmax over scores(None) [R, V], where scores(places_RC) gives the same scores at given places; none is NaN."""
    place_R, score_R = _first_best(scores, logits_RV.shape[-1])
    return shards.first_best(score_R, place_R + shards.first_id(logits_RV))


def _first_best(scores: Callable[[jax.Array | None], jax.Array], vocab_size: int) -> tuple[jax.Array, jax.Array]:
    whole = vocab_size // _BLOCK * _BLOCK
    scores_RV = scores(None)
    if whole == 0:
        return _first_largest(scores_RV), scores_RV.max(axis=-1)
    num_rows = scores_RV.shape[0]
    best = scores_RV[:, :whole].reshape(num_rows, whole // _BLOCK, _BLOCK).max(axis=-1)
    if whole < vocab_size:
        best = jnp.concatenate([best, scores_RV[:, whole:].max(axis=-1, keepdims=True)], axis=-1)
    # The last window may reach back into the block before it, where every score is then smaller.
    start = jnp.minimum(_first_largest(best) * _BLOCK, vocab_size - _BLOCK)
    ids_RC = start[:, None] + jnp.arange(_BLOCK, dtype=jnp.int32)[None]
    scores_RC = scores(ids_RC)
    return start + _first_largest(scores_RC), scores_RC.max(axis=-1)


def _first_largest(x_RC: jax.Array) -> jax.Array:
    places = jnp.arange(x_RC.shape[-1], dtype=jnp.int32)[None]
    is_largest = x_RC == x_RC.max(axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_largest, places, x_RC.shape[-1] - 1), axis=-1)
