"""Device. The layers that families share, each against a line of numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.models.base import random_weights
from jaxspec.models.layers import linear, rms_norm
from jaxspec.models.registry import family_of
from jaxspec.types import ArraySpec, Int8Weight


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 5])  # a lone bfloat16 row goes a way of its own
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(num_rows, dtype, with_bias):
    rng = np.random.default_rng(num_rows)
    x = rng.standard_normal((num_rows, 48)).astype(np.float32)
    weight, bias = rng.standard_normal((33, 48)).astype(dtype), rng.standard_normal(33).astype(dtype)
    found = jax.jit(linear)(x, weight, bias if with_bias else None)
    wanted = x.astype(dtype).astype(np.float64) @ weight.astype(np.float64).T + with_bias * bias.astype(np.float64)
    assert found.dtype == jnp.float32
    # float32 sums of 48 products; the rounding of x to the weight's dtype is part of the rule
    np.testing.assert_allclose(found, wanted, atol=3e-5)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("num_rows", [2, 5])
def test_gradients_are_products_in_the_weights_dtype(dtype, num_rows):
    rng = np.random.default_rng(num_rows)
    x = rng.standard_normal((num_rows, 6)).astype(dtype)
    weight, gradient = rng.standard_normal((4, 6)).astype(dtype), rng.standard_normal((num_rows, 4)).astype(np.float32)
    out, back = jax.vjp(linear, jnp.asarray(x), jnp.asarray(weight))
    to_x, to_weight = back(jnp.asarray(gradient))
    assert (out.dtype, to_x.dtype, to_weight.dtype) == (np.float32, dtype, dtype)
    rounded = gradient.astype(dtype).astype(np.float64)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype != np.float32 else {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(np.asarray(to_x, np.float64), rounded @ weight.astype(np.float64), **tolerance)
    np.testing.assert_allclose(np.asarray(to_weight, np.float64), rounded.T @ x.astype(np.float64), **tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 33), (3, 33), (1, 210), (9, 384), (144, 384), (3, 2 * 193)])
def test_linear_with_an_int8_weight(num_rows, size, dtype):
    """Of sizes that are cut into blocks or not."""
    rng = np.random.default_rng(num_rows)
    x, bias = rng.standard_normal((num_rows, 48)).astype(np.float32), rng.standard_normal(size).astype(np.float32)
    values, scale = rng.integers(-127, 128, (size, 48), np.int8), rng.uniform(0.1, 2, size).astype(np.float32)
    found = jax.jit(linear)(x, Int8Weight(values_oi=values, scale_o=scale, dtype=dtype), bias)
    weight = values.astype(np.float64) * scale.astype(np.float64)[:, None]
    wanted = x.astype(dtype).astype(np.float64) @ weight.T + bias
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=3e-3)  # the sums are of numbers near a hundred


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_only_cpu_converts_an_int8_weight_in_blocks(platform):
    """Elsewhere the integers are converted whole, on their way into the product."""
    x, values = jax.ShapeDtypeStruct((3, 48), jnp.float32), jax.ShapeDtypeStruct((384, 48), jnp.int8)
    weight = Int8Weight(values_oi=values, scale_o=jax.ShapeDtypeStruct((384,), jnp.float32), dtype="bfloat16")

    def plain(x, weight):
        return linear(x, weight.values_oi.astype(weight.dtype)) * weight.scale_o[None, :]

    def text(function, platform):
        return jax.jit(function).trace(x, weight).lower(lowering_platforms=(platform,)).as_text()

    found, wanted = text(linear, platform), text(plain, platform)
    for operation in ("dot_general", "convert", "while"):
        assert found.count(f"stablehlo.{operation}") == wanted.count(f"stablehlo.{operation}")
    assert "stablehlo.while" in text(linear, "cpu")


def test_rms_norm():
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32) * 1e-3
    weight = np.arange(8, dtype=np.float32)
    wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(rms_norm(x, weight, 1e-5), wanted, rtol=1e-5, atol=1e-7)


def test_random_weights_follow_their_specs():
    specs = {
        "norm": ArraySpec((5,), np.float32, ("embed",), 0.0),
        "layers": [ArraySpec((400, 50), jnp.bfloat16, ("a", "b"))],
    }
    weights = random_weights(specs, seed=3)
    assert weights["norm"].tolist() == [1.0] * 5
    (matrix,) = weights["layers"]
    assert (matrix.shape, matrix.dtype) == ((400, 50), jnp.bfloat16)
    assert abs(float(matrix.astype(jnp.float32).std()) - 0.02) < 0.001
    again = random_weights(specs, seed=3)["layers"][0]
    assert (matrix == again).all()
    assert not (matrix == random_weights(specs, seed=4)["layers"][0]).all()


def test_an_unknown_family_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"llama.*got 'mamba'"):
        family_of("mamba")
