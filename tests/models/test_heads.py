"""Device. Every drafter golden against its authors' code: a first pass, steps on the state fed back, drafts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.pages import pool_shape, slots_of
from jaxspec.models.base import Tokens
from scripts.check_golden import run_drafter
from tests.models.paging import load_model
from tests.oracle.folders import DRAFTERS, TINY
from tests.oracle.goldens import assert_close, read_golden


@pytest.mark.parametrize(("name", "kind"), DRAFTERS)
def test_goldens(name, kind):
    case = json.loads((TINY / name / "case.json").read_text())
    found, expected = run_drafter(TINY / name, case, kind)
    assert any(array.dtype == np.float32 for array in found.values())
    for array, ours in found.items():
        if array.endswith("tokens"):
            np.testing.assert_array_equal(ours, expected[array])
        else:
            assert_close(ours, expected[array])


# One of each way to run layers; streams_row0 are the recorded streams before each layer.
@pytest.mark.parametrize("name", ["llama-7layer", "gemma2", "gpt2", "deepseek-v3-mtp"])
def test_the_streams_that_heads_read_are_the_targets(name):
    family, config, weights = load_model(TINY / name)
    expected, n, page = read_golden(name), config.num_layers, 8
    ids_1T = expected["input_ids"][:1]
    T = ids_1T.shape[1]
    positions, pages = jnp.arange(T, dtype=jnp.int32)[None], jnp.arange(T // page, dtype=jnp.int32)[None]
    tokens = Tokens(
        token_ids_BT=jnp.asarray(ids_1T),
        positions_BT=positions,
        slots_BT=slots_of(positions, pages, page),
        pages_BM=pages,
    )
    pool = jnp.full(pool_shape(config, T // page, page), jnp.nan, jnp.float32)
    order = (n - 1, *range(n - 1))
    run = jax.jit(
        lambda weights, tokens, pool: family.forward(weights, config, tokens, pool, (*order, n))[0],
    )
    hidden, *streams = np.split(np.asarray(run(weights, tokens, pool))[0], n + 2, axis=-1)
    assert_close(hidden, expected["final_hidden"][0])
    for index, stream in zip(order, streams, strict=False):
        assert_close(stream, expected["streams_row0"][index])
    assert np.isfinite(streams[n]).all()
    assert np.abs(streams[n] - streams[0]).max() > 0.1, "the stream behind the last layer is one of its own"
