"""Device. Log-probabilities, ranks and the likeliest tokens against numpy's sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling.logprobs import token_logprobs


@pytest.mark.parametrize(("V", "num_top"), [(5, 5), (100, 7), (8193, 20), (8193, 1), (300, 300), (16384, 0)])
def test_logprobs_are_those_of_a_sort(V, num_top):
    rng = np.random.default_rng(V)
    logits = rng.normal(size=(2, 3, V)).astype(np.float32).round(1 if V > 1000 else 5)  # rounded: many ties
    logits[0, 1, : V // 2] = -np.inf
    ids = rng.integers(0, V, (2, 3))
    ids[1, 2] = -1
    run = jax.jit(token_logprobs, static_argnames=("num_top", "is_normalised"))
    found = run(jnp.asarray(logits), jnp.asarray(ids, jnp.int32), num_top=num_top, is_normalised=True)
    raw = run(jnp.asarray(logits), jnp.asarray(ids, jnp.int32), num_top=num_top, is_normalised=False)
    x = logits.astype(np.float64)
    logprob = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    for b, j in np.ndindex(2, 3):
        order = np.argsort(-logits[b, j], kind="stable")[:num_top]
        assert found.top_ids_BJX[b, j].tolist() == order.tolist()
        np.testing.assert_allclose(found.top_BJX[b, j], logprob[b, j][order], atol=1e-5)
        np.testing.assert_array_equal(raw.top_BJX[b, j], logits[b, j][order])
        if ids[b, j] >= 0:
            np.testing.assert_allclose(found.chosen_BJ[b, j], logprob[b, j, ids[b, j]], atol=1e-5)
            assert raw.chosen_BJ[b, j] == logits[b, j, ids[b, j]]
            assert found.rank_BJ[b, j] == 1 + (logits[b, j] > logits[b, j, ids[b, j]]).sum()
