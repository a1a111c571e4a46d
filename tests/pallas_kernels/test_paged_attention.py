"""Attention over pages against a loop in numpy, row by row as CPU runs it and all rows at once as accelerators do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas_kernels.paged_attention.api import paged_attention

LENGTHS = (1, 6, 21, 13)  # of the rows' contexts; the last has no page of its own for what lies past them
SLOTS, HEAD_SIZE, NUM_PAGES = 4, 8, 40


def kept(pool, cache):
    """(as the pool is handed in, what it means): bfloat16s are kept as their bits, NaN included."""
    if cache == "float32":
        return jnp.asarray(pool), pool
    rounded = pool.astype(jnp.bfloat16)
    return jnp.asarray(rounded.view(np.uint16)), rounded.astype(np.float32)


def naive(q_BTQH, pool, pages_BM, positions_BT, *, scale, window, softcap, value_size):
    """Each query by itself in float64; queries at position -1 give zeros."""
    heads = pool.shape[1]
    num_kv_heads, size = (heads // 2, HEAD_SIZE) if value_size is None else (heads, value_size)
    out = np.zeros((*q_BTQH.shape[:3], size))
    for b, t, head in np.ndindex(*q_BTQH.shape[:3]):
        group = head // (q_BTQH.shape[2] // num_kv_heads)
        scores, values = [], []
        for place in range(positions_BT[b, t] + 1):
            if window is not None and positions_BT[b, t] - place >= window:
                continue
            page, slot = pages_BM[b, place // SLOTS], place % SLOTS
            key = pool[page, group, slot].astype(np.float64)
            score = scale * q_BTQH[b, t, head].astype(np.float64) @ key
            scores.append(score if softcap is None else softcap * np.tanh(score / softcap))
            value = key[:size] if value_size is not None else pool[page, num_kv_heads + group, slot]
            values.append(value.astype(np.float64))
        if scores:
            weights = np.exp(np.array(scores) - max(scores))
            out[b, t, head] = weights @ np.array(values) / weights.sum()
    return out


@pytest.mark.parametrize("cache", ["float32", "bits"])
@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 5}, {"softcap": 2.0}, {"value_size": 6}],
    ids=["full", "window", "softcap", "latent"],
)
def test_rows_of_unlike_length_see_their_own_pages_alone(implementation, options, cache):
    options = {"scale": 0.3, "window": None, "softcap": None, "value_size": None} | options
    rng = np.random.default_rng(0)
    T, num_heads = 3, 4
    pool = rng.normal(size=(NUM_PAGES, 4, SLOTS, HEAD_SIZE)).astype(np.float32)
    q = rng.normal(size=(len(LENGTHS), T, num_heads, HEAD_SIZE)).astype(np.float32)
    pages = np.full((len(LENGTHS), 7), -1, np.int32)
    positions = np.full((len(LENGTHS), T), -1, np.int32)
    free = rng.permutation(NUM_PAGES)
    for row, length in enumerate(LENGTHS):
        count = -(-length // SLOTS)
        pages[row, :count], free = free[:count], free[count:]
        fed = min(T, length)
        positions[row, :fed] = np.arange(length - fed, length)
        pool[pages[row, count - 1], :, (length - 1) % SLOTS + 1 :] = np.nan  # slots not written yet
    pool[free] = np.nan
    handed, pool = kept(pool, cache)

    run = jax.jit(lambda *arrays: paged_attention(*arrays, implementation=implementation, **options))
    got = np.asarray(run(jnp.asarray(q), handed, jnp.asarray(pages), jnp.asarray(positions)))
    expected = naive(q, pool, pages, positions, **options)
    is_fed = positions >= 0
    np.testing.assert_allclose(got[is_fed], expected[is_fed], rtol=2e-5, atol=2e-5)
    assert np.isfinite(got).all()

    alone = np.asarray(run(*(jnp.asarray(x) for x in (q[2:3], handed, pages[2:3], positions[2:3]))))
    if implementation == "auto":
        np.testing.assert_array_equal(alone[0], got[2])


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("num_tokens", [128, 100, 3])  # of 128: the last pieces may be short, or empty
def test_a_prompt_of_several_pieces(implementation, window, num_tokens):
    rng = np.random.default_rng(num_tokens)
    B, T, before = 2, 128, np.array([0, 37])
    pool = rng.normal(size=(90, 4, SLOTS, HEAD_SIZE)).astype(np.float32)
    q = rng.normal(size=(B, T, 4, HEAD_SIZE)).astype(np.float32)
    pages = rng.permutation(90)[: 2 * 42].reshape(B, 42).astype(np.int32)
    at = np.arange(T)[None] + before[:, None]
    positions = np.where(np.arange(T)[None] < num_tokens, at, -1).astype(np.int32)
    options = {"scale": 0.3, "window": window, "softcap": None, "value_size": None}
    got = paged_attention(
        *(jnp.asarray(x) for x in (q, pool, pages, positions)), implementation=implementation, **options
    )
    fed = positions >= 0
    np.testing.assert_allclose(
        np.asarray(got)[fed], naive(q, pool, pages, positions, **options)[fed], rtol=2e-5, atol=2e-5
    )
    assert np.isfinite(got).all()
