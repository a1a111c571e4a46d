"""Host. What the kernels compute of a row, against numpy: noise, cutoffs, and statistics that shards join."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas_kernels.rejection import sweeps
from tests.rejection import numpy_reference as plain

V = 240


def rows_over(logits, first, end):
    """The kernels' view of a stretch of the vocabulary, as one tile."""

    def sweep(tile, visit, carry):
        ids = jnp.arange(first, end, dtype=jnp.int32)[None]
        return visit(carry, tile(jnp.int32(first), ids), ids)

    part = sweeps.Part((logits.shape[0], end - first), sweep)
    tile = lambda start, ids: sweeps.clean(jnp.asarray(logits[:, first:end]))  # noqa: E731
    return sweeps.Rows(V, (part,), tile, tile)


def random_rows():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, V)).astype(np.float32) * 3
    logits[1, ::2] = np.nan
    logits[2] = -np.inf
    logits[3, :200] = -np.inf
    logits[4, [7, 70, 170]] = 50  # a tie across shards: the first wins
    logits[5, 130] = np.inf
    return logits


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_statistics_of_shards_join_to_those_of_the_whole(num_shards):
    logits = random_rows()
    ends = np.linspace(0, V, num_shards + 1).astype(int)
    needs = jnp.full((6, 1), sweeps.NEEDS_NORM | sweeps.NEEDS_BEST, jnp.int32)
    zeros = jnp.zeros((6, 1), jnp.int32)
    drafted = jnp.asarray([[0], [3], [5], [239], [170], [-1]], jnp.int32)
    shards = [
        sweeps.statistics(rows_over(logits, first, end), needs, drafted, zeros, zeros)
        for first, end in itertools.pairwise(ends)
    ]
    norm = functools.reduce(sweeps.merge_norms, [norm for norm, _, _ in shards])
    best = functools.reduce(sweeps.merge_bests, [best for _, _, best in shards])
    logit = functools.reduce(jnp.maximum, [logit for _, logit, _ in shards])

    kept = np.where(np.isnan(logits), -np.inf, np.minimum(logits, np.finfo(np.float32).max)).astype(np.float64)
    np.testing.assert_array_equal(best.id[:, 0], kept.argmax(axis=1))
    np.testing.assert_array_equal(best.score[:, 0], kept.max(axis=1))
    at_draft = [kept[row, id] if id >= 0 else -np.inf for row, id in enumerate(drafted[:, 0].tolist())]
    np.testing.assert_array_equal(logit[:, 0], at_draft)
    with np.errstate(divide="ignore"):
        peak = np.where(kept.max(axis=1) > -np.inf, kept.max(axis=1), 0)
        expected = peak + np.log(np.exp(kept - peak[:, None]).sum(axis=1))
    np.testing.assert_allclose(sweeps.log_norm(norm)[:, 0], expected, rtol=1e-6)


def test_noise_is_the_counter_hash_of_key_and_id():
    rng = np.random.default_rng(1)
    keys = np.concatenate([np.zeros((1, 2)), np.full((1, 2), 2**32 - 1), rng.integers(2**32, size=(4, 2))])
    words = jnp.asarray(keys.astype(np.uint32).view(np.int32))
    found = sweeps.gumbel(words[:, :1], words[:, 1:], jnp.arange(V, dtype=jnp.int32)[None])
    np.testing.assert_allclose(found, np.stack([plain.noise(key.astype(int), V) for key in keys]), rtol=3e-6, atol=1e-6)
    # Random123's known answer for key 0, counter 0.
    assert plain.hash_words((0, 0), (0, 0))[0] == 0x6B200159


@pytest.mark.parametrize("top_k", [0, 1, 3, 50, V, 10 * V])
def test_cutoffs_keep_what_a_sort_keeps(top_k):
    logits = random_rows()[[0, 3, 4]]  # beside +inf nothing has a probability, kept or not
    rows = rows_over(logits, 0, V)
    for top_p, min_p in ((1.0, 0.0), (0.9, 0.0), (0.3, 0.05), (1.0, 1.0)):
        columns = [jnp.full((3, 1), value) for value in (jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p))]
        cutoff = np.asarray(sweeps.cutoff(rows, *columns))
        for row, own, limit in zip(logits, plain_rows(logits, top_k, top_p, min_p), cutoff[:, 0], strict=True):
            kept = np.minimum(row, np.finfo(np.float32).max) >= limit
            np.testing.assert_array_equal(kept & (row > -np.inf), own > -np.inf)


def plain_rows(logits, top_k, top_p, min_p):
    # 2: beyond every sum of probabilities, whose rounding would else decide what a filter that is off removes.
    row = plain.Row(key=(0, 0), temperature=1.0, top_k=top_k, top_p=2.0 if top_p == 1 else top_p, min_p=min_p)
    return [plain.kept_logits(np.minimum(one, np.finfo(np.float32).max), row) for one in logits]


def test_penalties_in_their_order():
    logits = jnp.asarray([[2.0, -2.0, 2.0, -2.0, 1.0]])
    counts = jnp.asarray([[2, 1, 2**30, 2**30 + 3, 0]], jnp.int32)
    found = sweeps.penalise(logits, counts, *(jnp.full((1, 1), value, jnp.float32) for value in (0.5, 0.25, 2.0)))
    # repetition 2 halves a positive logit and doubles a negative one; then 0.25 a time, and 0.5 once
    expected = [1 - 0.5 - 0.5, -4 - 0.25 - 0.5, 1, -4 - 0.75 - 0.5, 1]
    np.testing.assert_array_equal(found[0], np.float32(expected))
