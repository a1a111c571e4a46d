"""Device. Rotary embedding: frequencies of every kind against values from transformers; what a turn leaves alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.hf_rope import yarn_magnitude
from jaxspec.config.model import RopeConfig
from jaxspec.models.rope import apply_rope, rope_frequencies, rope_tables

# (rope, head size, {j: frequency j}), recorded from transformers in float32.
RECORDED = {
    "llama3.1": (
        RopeConfig(theta=5e5, kind="llama3", factor=8, low_freq_factor=1, high_freq_factor=4,
                   original_max_position_embeddings=8192),
        128,
        {0: 1, 20: 0.0165604409, 28: 0.00321144611, 32: 0.000524846022, 36: 7.78465546e-5, 40: 3.42810235e-5,
         63: 3.06892588e-7},
    ),
    "deepseek": (
        RopeConfig(theta=1e4, kind="yarn", factor=40, original_max_position_embeddings=4096),
        64,
        {0: 1, 8: 0.1, 10: 0.0562341288, 12: 0.0268793609, 16: 0.0055, 20: 0.000790569407, 24: 2.5e-5,
         31: 3.33380353e-6},
    ),
    "qwen3 yarn": (
        RopeConfig(theta=1e6, kind="yarn", factor=4, original_max_position_embeddings=32768),
        128,
        {20: 0.0133352149, 24: 0.00537532149, 32: 0.000602941145, 40: 4.44569851e-5, 63: 3.10234441e-7},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_frequencies(name):
    rope, head_dim, recorded = RECORDED[name]
    found = rope_frequencies(rope, head_dim)
    assert (found.shape, found.dtype) == ((head_dim // 2,), np.float32)
    np.testing.assert_allclose([found[j] for j in recorded], list(recorded.values()), rtol=2e-6)


def test_magnitudes():
    assert yarn_magnitude(4, 1) == pytest.approx(1.13862944, rel=1e-8)
    assert yarn_magnitude(40, 1) ** 2 == pytest.approx(1.8739, rel=1e-4)
    assert yarn_magnitude(1, 1) == 1


def test_shares_of_a_head():
    half = rope_frequencies(RopeConfig(partial_factor=0.5), 16)
    np.testing.assert_allclose(half, 1e4 ** (-np.arange(4) / 4), rtol=1e-6)
    first = rope_frequencies(RopeConfig(kind="proportional", partial_factor=0.5, factor=2.0), 16)
    np.testing.assert_allclose(first, [*(1e4 ** (-np.arange(4) / 8) / 2), 0, 0, 0, 0], rtol=1e-6)


def test_a_turn_is_a_complex_product_and_leaves_the_rest():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 5, 2, 10)).astype(np.float32)
    rope = RopeConfig(theta=100.0, partial_factor=0.6, attention_factor=1.5)
    positions = np.array([[0, 3, 11, 2, 7]], np.int32)
    found = apply_rope(jnp.asarray(x), rope_tables(jnp.asarray(positions), rope, 10))
    turn = 1.5 * np.exp(1j * positions[0][:, None] * 100.0 ** (-np.arange(3) / 3)[None])
    pairs = (x[..., :3] + 1j * x[..., 3:6]) * turn[None, :, None]
    np.testing.assert_allclose(found, np.concatenate([pairs.real, pairs.imag, x[..., 6:]], axis=-1), atol=1e-5)
