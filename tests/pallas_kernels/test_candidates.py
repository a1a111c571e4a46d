"""Host. A draw among a row's largest entries says when it is sure to be the draw from all of them, and then is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.keys import gumbel
from jaxspec.pallas_kernels.rejection.argmax import (
    LARGEST_NOISE,
    argmax_among,
    gumbel_argmax_among,
    row_argmax,
    row_gumbel_argmax,
)
from jaxspec.pallas_kernels.rejection.candidates import candidates


@jax.jit
def drawn(x_RV, key_R2, is_noised_R):
    found = candidates(x_RV)
    among_R, is_sure_R = gumbel_argmax_among(found.x_RC, found, key_R2, found.floor_R, is_noised_R)
    return among_R, is_sure_R, row_gumbel_argmax(x_RV, key_R2, is_noised_R), argmax_among(found.x_RC, found)


@pytest.mark.parametrize("vocab_size", [100, 5000])
def test_a_sure_draw_is_the_draw(vocab_size):
    rng = np.random.default_rng(vocab_size)
    num_rows = 200
    x = rng.normal(size=(num_rows, vocab_size)) * rng.choice([0.0, 0.5, 10.0], (num_rows, 1))
    x = np.round(x, rng.choice([0, 6]))  # ties as well
    # A head that stands out by more than noise can make up for, or by a little less.
    heads = np.stack([rng.choice(vocab_size, 20, replace=False) for _ in range(num_rows)])
    np.put_along_axis(x, heads, x.max(axis=1, keepdims=True) + rng.choice([0, 15, 20], (num_rows, 1)), axis=1)
    x[:4] = -np.inf
    x[4:8, ::2] = -np.inf
    x = jnp.asarray(x, jnp.float32)
    key_R2 = jnp.asarray(rng.integers(2**32, size=(num_rows, 2), dtype=np.uint32))
    is_noised_R = jnp.asarray(rng.random(num_rows) < 0.8)
    among_R, is_sure_R, all_R, best_R = drawn(x, key_R2, is_noised_R)
    np.testing.assert_array_equal(among_R[is_sure_R], all_R[is_sure_R])
    np.testing.assert_array_equal(best_R, row_argmax(x))
    assert is_sure_R.all() if vocab_size == 100 else 0.2 < is_sure_R.mean() < 0.9


def test_no_noise_is_above_the_bound():
    """Its largest value comes from the largest cell of the grid; found here by hashing until one is near it."""
    ids = jnp.arange(2**22, dtype=jnp.int32)
    noise = np.asarray(jax.jit(gumbel)(jnp.asarray([3, 5], jnp.uint32), ids))
    largest = -np.log(-np.log((2**23 - 0.5) / 2**23))
    assert 14 < noise.max() <= largest + 1e-4 < LARGEST_NOISE < largest + 0.01
