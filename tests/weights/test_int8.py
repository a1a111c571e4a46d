"""Host. Int8 weights: the rounding row by row, which parameters take part, and an engine that runs on them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ConfigError, EngineConfig, SamplingParams
from jaxspec.engine.build import _load, _num_int8, _num_parameters
from jaxspec.models.registry import FAMILIES, family_of
from jaxspec.types import Int8Weight
from jaxspec.weights.checkpoint import open_checkpoint
from jaxspec.weights.int8 import quantize
from tests.contracts.members import FAMILY_MEMBERS
from tests.lossless.engines import make_engine
from tests.models.paging import Pager
from tests.oracle.folders import TINY


def test_rows_are_rounded_to_their_own_scale():
    weight = np.array([[1.0, -2.54, 0.01], [0, 0, 0], [1e-30, 3e-30, -2e-30], [127, 64.5, -65.5]], np.float32)
    values, scale = quantize(weight)
    assert values.dtype == np.int8
    np.testing.assert_array_equal(values, [[50, -127, 0], [0, 0, 0], [42, 127, -85], [127, 64, -66]])
    np.testing.assert_allclose(scale, [2.54 / 127, 1.0, 3e-30 / 127, 1.0], rtol=1e-6)
    # No value is farther off than half a step of its row.
    assert (np.abs(values * scale[:, None] - weight) <= scale[:, None] * 0.5001).all()


def test_only_the_layers_linear_maps_become_integers():
    with open_checkpoint(TINY / "llama31") as checkpoint:
        plain, int8 = _load(checkpoint, "bfloat16"), _load(checkpoint, "bfloat16", "int8")
    for name in ("embed", "head", "final_norm"):
        np.testing.assert_array_equal(int8[name], plain[name])
    for name, found in int8["layers"][1].items():
        wanted = np.asarray(plain["layers"][1][name], np.float32)
        if name in ("qkv", "o", "gate_up", "down"):
            assert isinstance(found, Int8Weight)
            assert (found.values_oi.dtype, found.dtype, found.shape) == (jnp.int8, "bfloat16", wanted.shape)
            off = np.abs(np.asarray(found.values_oi, np.float32) * np.asarray(found.scale_o)[:, None] - wanted)
            assert (off <= np.abs(wanted).max(axis=1, keepdims=True) * (0.5 / 127 + 2**-8)).all()
        else:
            np.testing.assert_array_equal(found, plain["layers"][1][name])


@pytest.mark.parametrize("name", ["llama31", "gpt2", "deepseek-v3-mtp"])
def test_the_memory_plan_counts_what_is_loaded(name):
    """Integers and scales exactly; norms and routers, which stay float32, are the rest."""
    with open_checkpoint(TINY / name) as checkpoint:
        loaded, (values, scales) = _load(checkpoint, "float32", "int8"), _num_int8(checkpoint.config)
        num_parameters = _num_parameters(checkpoint.config)
    leaves = jax.tree.leaves(loaded)
    assert 0 < values == sum(leaf.size for leaf in leaves if leaf.dtype == jnp.int8)
    assert sum(leaf.nbytes for leaf in leaves) == 4 * (num_parameters - values) + values + 4 * scales


@pytest.mark.heavy
def test_an_engine_runs_on_them_and_speculation_changes_nothing(tmp_path):
    prompt = {"prompt_token_ids": [5, 6, 7, 5, 6]}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = []
    for speculative in (None, {"method": "ngram", "num_speculative_tokens": 2}):
        engine = make_engine(TINY / "llama", speculative, max_model_len=32, quantization="int8", dtype="float32")
        (output,) = engine.generate(prompt, params, use_tqdm=False)
        texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_a_family_without_an_int8_form_says_so(monkeypatch):
    with open_checkpoint(TINY / "llama") as checkpoint:
        monkeypatch.setitem(FAMILIES, "llama", family_of("llama")._replace(int8_names=()))
        with pytest.raises(ConfigError, match="'int8' is not supported for llama"):
            _load(checkpoint, "bfloat16", "int8")


def test_other_quantisations_are_refused():
    assert EngineConfig(model="x", quantization="int8").quantization == "int8"
    for wrong in ("fp8", "int4", True):
        with pytest.raises(ConfigError, match="quantization"):
            EngineConfig(model="x", quantization=wrong)


@pytest.mark.heavy
@pytest.mark.parametrize("name", FAMILY_MEMBERS)
def test_every_family_multiplies_by_what_was_rounded(name):
    """The integers with their scales, written out in float32, give the same logits."""
    prompt = [np.random.default_rng(1).integers(0, 30, 9).tolist()]
    pagers = [Pager(TINY / name, num_rows=1, max_len=12, page_size=4) for _ in range(2)]
    with open_checkpoint(TINY / name) as checkpoint:
        rounded = _load(checkpoint, "float32", "int8")

    def is_int8(leaf):
        return isinstance(leaf, Int8Weight)

    def written_out(leaf):
        return leaf.values_oi.astype(jnp.float32) * leaf.scale_o[:, None] if is_int8(leaf) else leaf

    pagers[0].weights, pagers[1].weights = rounded, jax.tree.map(written_out, rounded, is_leaf=is_int8)
    found, wanted = (pager.feed(prompt)[0][1] for pager in pagers)
    assert np.abs(found - wanted).max() <= 2e-5 * np.abs(wanted).max()


def test_goldens_keep_their_first_choice_nearly_always():
    """A random tiny model with wide logits: 1/254 of each row's largest weight is little to it."""
    expected = np.load(TINY / "llama" / "expected.npz")
    pager = Pager(TINY / "llama", num_rows=2, max_len=24, page_size=8)
    with open_checkpoint(TINY / "llama") as checkpoint:
        pager.weights = _load(checkpoint, "float32", "int8")
    logits = np.stack([row[1] for row in pager.feed(expected["input_ids"].tolist())])
    wanted = expected["logits"]
    assert np.abs(logits - wanted).max() / np.abs(wanted).max() < 0.05
    assert (logits.argmax(-1) == wanted.argmax(-1)).mean() > 0.9
    assert np.abs(logits - wanted).max() > 1e-4  # it did act
    assert json.loads((TINY / "llama" / "config.json").read_text())["vocab_size"] == wanted.shape[-1]
