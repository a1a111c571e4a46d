"""Device. What every family owes: specs, names and a forward pass that fit together, in float32 and bfloat16."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.pages import pool_shape
from jaxspec.models.base import Tokens, random_weights
from jaxspec.models.registry import FAMILIES, family_of
from jaxspec.types import ArraySpec
from jaxspec.weights.checkpoint import open_checkpoint
from tests.contracts.members import check_step
from tests.oracle.folders import TINY

# A drafter's case names its target.
FOLDERS = sorted(case.parent.name for case in TINY.glob("*/case.json") if "target" not in json.loads(case.read_text()))
B, T, P, S = 2, 5, 6, 4


def read_config(name):
    with open_checkpoint(TINY / name) as checkpoint:
        return checkpoint.config


def test_every_family_has_a_folder_here():
    assert {read_config(name).family for name in FOLDERS} == set(FAMILIES)


def spec_paths(tree, prefix=""):
    if isinstance(tree, ArraySpec):
        return {prefix.rstrip(".")}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return set().union(*(spec_paths(child, f"{prefix}{key}.") for key, child in items))


@pytest.mark.parametrize("source", ["hf", "gguf"])
@pytest.mark.parametrize("name", FOLDERS)
def test_every_parameter_has_a_name_and_no_other_has(name, source):
    config = read_config(name)
    family = family_of(config.family)
    assert set(family.name_table(config, source).sources) == spec_paths(family.specs(config, np.float32))


# tests/models has them all in float32.
@pytest.mark.parametrize(("name", "dtype"), [*((name, jnp.bfloat16) for name in FOLDERS), ("qwen2", jnp.float32)])
def test_forward_and_logits(name, dtype):
    config = read_config(name)
    family = family_of(config.family)
    specs = family.specs(config, dtype)
    for spec in jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, ArraySpec)):
        assert len(spec.axes) == len(spec.shape)
    weights = random_weights(specs, 0)
    pages_BM = np.array([[4, 2, -1], [0, 5, -1]], np.int32)
    positions_BT = np.array([[0, 1, 2, 3, 4], [0, 1, -1, -1, -1]], np.int32)
    slots_BT = np.array([[16, 17, 18, 19, 8], [0, 1, -1, -1, -1]], np.int32)
    tokens = Tokens(
        token_ids_BT=np.arange(B * T, dtype=np.int32).reshape(B, T),
        positions_BT=positions_BT,
        slots_BT=slots_BT,
        pages_BM=pages_BM,
    )

    def run(weights, pool, tokens):
        hidden, pool = family.forward(weights, config, tokens, pool)
        return pool, hidden, family.logits(weights, config, hidden)

    pool = jnp.full(pool_shape(config, P, S), jnp.nan, dtype)
    pool, hidden, logits = check_step(run, 1, weights, pool, tokens)
    assert (hidden.shape, hidden.dtype) == ((B, T, config.hidden_size), jnp.float32)
    assert (logits.shape, logits.dtype) == ((B, T, config.vocab_size), jnp.float32)
    assert np.isfinite(hidden).all()
    assert np.isfinite(logits).all()
    # Written: the slots given, in every layer; nothing else.
    by_layer = np.asarray(pool.astype(jnp.float32)).reshape(config.num_layers, P, -1, S, config.head_dim)
    is_written = np.isfinite(by_layer).all(axis=(2, 4))
    wanted = np.zeros((P, S), bool)
    wanted.reshape(-1)[slots_BT[slots_BT >= 0]] = True
    np.testing.assert_array_equal(is_written, np.broadcast_to(wanted, is_written.shape))
    np.testing.assert_array_equal(np.isnan(by_layer).all(axis=(2, 4)), ~is_written)
