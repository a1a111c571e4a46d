"""Device. What the rejection kernels compute of a few rows, tile by tile; the TPU and the GPU body share it.

How a tile reaches the core is a body's own business: it hands in `Rows`, which reads tiles and folds a visit over
them. Numbers gather lane by lane, in arrays of a tile's shape, and meet in one reduction at the end; a row's own
scalars are columns [rows, 1]. Only operations that both Mosaic and Triton lower occur: no uint32, no integer sums.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Tile = Callable[[jax.Array, jax.Array], jax.Array]  # (first id, ids i32[1, lanes]) -> f32[rows, lanes]
Visit = Callable[[Any, jax.Array, jax.Array], Any]  # (carry, tile f32[rows, lanes], ids) -> carry

LARGEST = 3.4028234663852886e38
_NOT_AN_ID = 2.0**24  # ids are reduced as float32: exact up to here
_SLACK = 2.0**-21  # of a row's cutoff, relative to its largest entry: four units in the last place
_LOWEST_KEY = -2139095041  # `_ordered(-inf)`
_OUTPUT_COUNT = 2**30 - 1  # the bits of a count that are outputs; the next says "in the prompt"

# What a row of logits needs of pass 1; bits.
NEEDS_NORM, NEEDS_BEST, NEEDS_NOISE = 1, 2, 4

# What a draw makes of a row's logits before the noised arg-max; PLAIN rows are not drawn.
PLAIN, WHOLE, WITHOUT_DRAFT, EXCESS = 0, 1, 2, 3


class Part(NamedTuple):
    """A stretch of the vocabulary that is walked in tiles of one shape."""

    shape: tuple[int, int]  # rows, lanes
    sweep: Callable[[Tile | None, Visit, Any], Any]  # folds a visit over the stretch's tiles, from a first carry on


class Rows(NamedTuple):
    """The rows that a kernel's program works on. Tiles are cleaned, and -inf past the vocabulary."""

    vocab_size: int
    parts: tuple[Part, ...]
    target: Tile | None  # penalised, scaled by temperature, and -inf below the cutoff
    draft: Tile | None


class Norm(NamedTuple):
    """A running log-sum-exp: sum exp(x) = total * exp(peak). total is 0 while there is nothing but -inf."""

    peak: jax.Array
    total: jax.Array


class Best(NamedTuple):
    """A running arg-max: the largest score and the first id that has it; id 0 while there is nothing but -inf."""

    score: jax.Array
    id: jax.Array


def merge_norms(one: Norm, other: Norm) -> Norm:
    """The statistics of two disjoint parts of the vocabulary, joined."""
    peak = jnp.maximum(one.peak, other.peak)
    base = jnp.where(peak > -jnp.inf, peak, jnp.float32(0))
    return Norm(peak, one.total * jnp.exp(one.peak - base) + other.total * jnp.exp(other.peak - base))


def merge_bests(one: Best, other: Best) -> Best:
    """The same for arg-max: of equal scores, the smaller id."""
    is_other = (other.score > one.score) | ((other.score == one.score) & (other.id < one.id))
    return Best(jnp.maximum(one.score, other.score), jnp.where(is_other, other.id, one.id))


def log_norm(norm: Norm) -> jax.Array:
    """log sum exp; -inf if there is nothing but -inf."""
    return norm.peak + jnp.log(norm.total)


def clean(logits: jax.Array, temperature: jax.Array | float = 1.0) -> jax.Array:
    """logits / temperature in float32, NaN as -inf, +inf as the largest float."""
    x = logits.astype(jnp.float32) / temperature
    return jnp.where(x == x, jnp.minimum(x, jnp.float32(LARGEST)), -jnp.inf)


def penalise(logits: jax.Array, counts: jax.Array, presence, frequency, repetition) -> jax.Array:
    """Logits after repetition, then frequency, then presence have cost each id what its count says."""
    num_outputs = counts & jnp.int32(_OUTPUT_COUNT)
    x = jnp.where(counts > 0, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    x = x - frequency * num_outputs.astype(jnp.float32)
    return x - presence * jnp.where(num_outputs > 0, jnp.float32(1), jnp.float32(0))


def gumbel(key_lo: jax.Array, key_hi: jax.Array, ids: jax.Array) -> jax.Array:
    """-log(-log u), u from the first word of Threefry-2x32, 20 rounds, of (key, (id, 0)); in int32 arithmetic."""
    shape = jnp.broadcast_shapes(key_lo.shape, ids.shape)
    keys = (key_lo, key_hi, key_lo ^ key_hi ^ jnp.int32(0x1BD11BDA))
    a, b = jnp.broadcast_to(ids + key_lo, shape), jnp.broadcast_to(key_hi, shape)
    for group in range(5):
        for left in (13, 15, 26, 6) if group % 2 == 0 else (17, 29, 16, 24):
            a = a + b
            b = a ^ (lax.shift_left(b, jnp.int32(left)) | lax.shift_right_logical(b, jnp.int32(32 - left)))
        a = a + keys[(group + 1) % 3]
        b = b + (keys[(group + 2) % 3] + jnp.int32(group + 1))
    cell = lax.shift_right_logical(a, jnp.int32(9)).astype(jnp.float32)
    return -jnp.log(-jnp.log((cell + 0.5) * jnp.float32(2.0**-23)))


def statistics(
    rows: Rows, needs: jax.Array, draft_id: jax.Array, key_lo: jax.Array, key_hi: jax.Array
) -> tuple[Norm, jax.Array, Best]:
    """Pass 1: the log-sum-exp of each row and its draft's own logit, or its arg-max, whatever its rule asks for.

    NOTE: the draft's logit is read here, not gathered outside: a cutoff is compared with it, and another compiler's
    division or multiply-add may be a bit off. With top-k 1 that bit decides everything.
    """
    zero = jnp.zeros(needs.shape, jnp.float32)
    is_noised = (needs & NEEDS_NOISE) != 0

    def noised(x: jax.Array, ids: jax.Array) -> jax.Array:
        return x + jnp.where(is_noised, gumbel(key_lo, key_hi, ids), jnp.float32(0))

    def plain() -> Best:
        return lax.cond(
            _any((needs & NEEDS_BEST) != 0),
            lambda: _best(rows, rows.target, lambda x, ids: x),
            lambda: Best(zero, jnp.zeros(needs.shape, jnp.int32)),
        )

    norm, drafted = lax.cond(
        _any((needs & NEEDS_NORM) != 0), lambda: _norm(rows, rows.target, draft_id), lambda: (Norm(zero, zero), zero)
    )
    return norm, drafted, lax.cond(_any(is_noised), lambda: _best(rows, rows.target, noised), plain)


def draft_norm(rows: Rows, needs: jax.Array) -> Norm:
    """The log-sum-exp of the drafter's rows."""
    zero = jnp.zeros(needs.shape, jnp.float32)
    return lax.cond(_any(needs != 0), lambda: _norm(rows, rows.draft, None)[0], lambda: Norm(zero, zero))


def excess_mass(
    rows: Rows, needs: jax.Array, log_norm: jax.Array, log_joint: jax.Array, draft_log_norm: jax.Array
) -> jax.Array:
    """The sum over the vocabulary of max(exp(log_joint) * p - q, 0)."""

    def tile(start: jax.Array, ids: jax.Array) -> jax.Array:
        return _excess(rows, start, ids, log_norm, log_joint, draft_log_norm)[2]

    return lax.cond(
        _any(needs != 0),
        lambda: _total(rows, tile, lambda excess: jnp.where(excess > 0, excess, jnp.float32(0))),
        lambda: jnp.zeros(needs.shape, jnp.float32),
    )


def draw(
    rows: Rows,
    mode: jax.Array,
    draft_id: jax.Array,
    key_lo: jax.Array,
    key_hi: jax.Array,
    log_norm: jax.Array,
    log_joint: jax.Array,
    draft_log_norm: jax.Array,
) -> Best:
    """Pass 2: a token of what a rejected draft leaves to draw from, by the row's mode.

    That is the whole target, all but the draft (its distribution was a point mass), or max(exp(log_joint) * p - q, 0).
    """

    def tile(start: jax.Array, ids: jax.Array) -> jax.Array:
        if rows.draft is None:
            assert rows.target is not None
            x = rows.target(start, ids)
            return jnp.where((mode == WITHOUT_DRAFT) & (ids == draft_id), -jnp.inf, x)
        x, logprob, excess = _excess(rows, start, ids, log_norm, log_joint, draft_log_norm)
        # Should rounding leave no excess at all, the target itself; below the smallest real excess till then.
        residual = jnp.where(excess > 0, jnp.log(excess), logprob - jnp.float32(1e4))
        # NaN: a row of either that holds -inf alone.
        return jnp.where(mode == EXCESS, jnp.where(residual == residual, residual, -jnp.inf), x)

    def noised(x: jax.Array, ids: jax.Array) -> jax.Array:
        return x + gumbel(key_lo, key_hi, ids)

    return lax.cond(
        _any(mode != PLAIN),
        lambda: _best(rows, tile, noised),
        lambda: Best(jnp.zeros(mode.shape, jnp.float32), jnp.zeros(mode.shape, jnp.int32)),
    )


def cutoff(rows: Rows, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """What an entry must reach to survive min-p, then top-k, then top-p; -inf if all are off.

    A cutoff is the smallest value such that what lies above it weighs less than the filter's limit: bisected over the
    floats in their order, 32 halvings for the whole range.
    """
    off = jnp.full(top_k.shape, -jnp.inf, jnp.float32)
    is_k_on, is_p_on = (top_k > 0) & (top_k < rows.vocab_size), top_p < 1

    def bisect(weigh: Callable[[jax.Array], jax.Array], limit: jax.Array, peak: jax.Array) -> jax.Array:
        def halve(_, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            low, high = state
            middle = (low & high) + lax.shift_right_arithmetic(low ^ high, jnp.int32(1))  # their mean, rounded down
            threshold = _unordered(middle)
            above = _total(rows, rows.target, lambda x: jnp.where(x > threshold, weigh(x), jnp.float32(0)))
            is_enough = above < limit
            return jnp.where(is_enough, low, middle + 1), jnp.where(is_enough, middle, high)

        lowest = jnp.full(peak.shape, _LOWEST_KEY, jnp.int32)
        return _unordered(lax.fori_loop(0, 32, halve, (lowest, _ordered(peak)))[1])

    def search() -> jax.Array:
        peak = _peak(rows, rows.target)
        found = jnp.where(min_p > 0, jnp.minimum(peak + jnp.log(min_p), peak), off)

        def top_k_cutoff() -> jax.Array:
            return jnp.where(is_k_on, bisect(jnp.ones_like, top_k.astype(jnp.float32), peak), off)

        found = jnp.maximum(found, lax.cond(_any(is_k_on), top_k_cutoff, lambda: off))

        def mass(x: jax.Array) -> jax.Array:
            return jnp.where(x >= found, jnp.exp(x - peak), jnp.float32(0))

        def top_p_cutoff() -> jax.Array:
            limit = top_p * _total(rows, rows.target, mass)
            return jnp.where(is_p_on, bisect(mass, limit, peak), off)

        found = jnp.maximum(found, lax.cond(_any(is_p_on), top_p_cutoff, lambda: off))
        # NOTE: other kernels compute the same logits again, and a compiler may contract a product and a sum in one of
        # them alone. A few units in the last place of slack, or with top-k 1 nothing might be left.
        return found - jnp.maximum(jnp.abs(peak), jnp.abs(found)) * jnp.float32(_SLACK)

    return lax.cond(_any(is_filtered(top_k, top_p, min_p)), search, lambda: off)


def is_filtered(top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Whether a row has a filter at all."""
    return (top_k > 0) | (top_p < 1) | (min_p > 0)


def _excess(rows: Rows, start, ids, log_norm, log_joint, draft_log_norm) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The target's logits, log(exp(log_joint) * p), and how much that is above q."""
    assert rows.target is not None
    assert rows.draft is not None
    x = rows.target(start, ids)
    # In this order: beside logits of 1e30 log_joint would be nothing.
    logprob = x - log_norm + log_joint
    return x, logprob, jnp.exp(logprob) - jnp.exp(rows.draft(start, ids) - draft_log_norm)


def _norm(rows: Rows, tile: Tile | None, wanted: jax.Array | None) -> tuple[Norm, jax.Array]:
    """The rows' log-sum-exp, and what they hold at the ids wanted (-inf for an id that is none)."""

    def visit(lanes: tuple[Norm, jax.Array], x: jax.Array, ids: jax.Array) -> tuple[Norm, jax.Array]:
        norm, found = lanes
        distance = x - norm.peak
        # One exponential an entry, whichever of the two is the new peak. NaN: both are -inf.
        small = jnp.where(x > -jnp.inf, jnp.exp(-jnp.abs(distance)), jnp.float32(0))
        total = jnp.where(distance > 0, norm.total * small + 1, norm.total + small)
        return Norm(jnp.maximum(norm.peak, x), total), found if wanted is None else jnp.where(ids == wanted, x, found)

    def of(part: Part) -> tuple[Norm, jax.Array]:
        nothing = _full(part, -jnp.inf)
        norm, found = part.sweep(tile, visit, (Norm(nothing, _full(part, 0)), nothing))
        peak = jnp.max(norm.peak, axis=1, keepdims=True)
        base = jnp.where(peak > -jnp.inf, peak, jnp.float32(0))
        total = jnp.sum(norm.total * jnp.exp(norm.peak - base), axis=1, keepdims=True)
        return Norm(peak, total), jnp.max(found, axis=1, keepdims=True)

    parts = [of(part) for part in rows.parts]
    return functools.reduce(merge_norms, [norm for norm, _ in parts]), functools.reduce(
        jnp.maximum, [found for _, found in parts]
    )


def _best(rows: Rows, tile: Tile | None, score: Callable[[jax.Array, jax.Array], jax.Array]) -> Best:
    def visit(lanes: Best, x: jax.Array, ids: jax.Array) -> Best:
        scores = score(x, ids)
        return Best(jnp.maximum(lanes.score, scores), jnp.where(scores > lanes.score, ids, lanes.id))

    def of(part: Part) -> Best:
        lanes = part.sweep(tile, visit, Best(_full(part, -jnp.inf), jnp.zeros(part.shape, jnp.int32)))
        best = jnp.max(lanes.score, axis=1, keepdims=True)
        first = jnp.where(lanes.score == best, lanes.id.astype(jnp.float32), jnp.float32(_NOT_AN_ID))
        return Best(best, jnp.min(first, axis=1, keepdims=True).astype(jnp.int32))

    return functools.reduce(merge_bests, map(of, rows.parts))


def _peak(rows: Rows, tile: Tile | None) -> jax.Array:
    def of(part: Part) -> jax.Array:
        lanes = part.sweep(tile, lambda lanes, x, _: jnp.maximum(lanes, x), _full(part, -jnp.inf))
        return jnp.max(lanes, axis=1, keepdims=True)

    return functools.reduce(jnp.maximum, map(of, rows.parts))


def _total(rows: Rows, tile: Tile | None, weigh: Callable[[jax.Array], jax.Array]) -> jax.Array:
    def of(part: Part) -> jax.Array:
        lanes = part.sweep(tile, lambda lanes, x, _: lanes + weigh(x), _full(part, 0))
        return jnp.sum(lanes, axis=1, keepdims=True)

    return functools.reduce(jnp.add, map(of, rows.parts))


def _full(part: Part, value: float) -> jax.Array:
    return jnp.full(part.shape, value, jnp.float32)


def _any(is_on: jax.Array) -> jax.Array:
    return jnp.max(jnp.where(is_on, jnp.float32(1), jnp.float32(0))) > 0


def _ordered(x: jax.Array) -> jax.Array:
    """int32 keys in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _unordered(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ jnp.int32(0x7FFFFFFF), key), jnp.float32)
