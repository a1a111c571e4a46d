"""Host. The device's columns of sampling parameters: right types, and one way to say greedy."""

import jax.numpy as jnp
import numpy as np

from jaxspec.keys import request_key
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.table import make_table, neutral_table


def test_columns_hold_the_parameters():
    params = [
        SamplingParams(temperature=1e-7, top_k=5),
        SamplingParams(temperature=0.5, top_k=-1, top_p=0.25, min_p=0.125),
        SamplingParams(top_k=2**40),
    ]
    keys = np.stack([request_key(seed) for seed in range(3)])
    table = make_table(params, keys)
    assert table.temperature_B.tolist() == [0.0, 0.5, 1.0]
    assert table.top_k_B.tolist() == [5, 0, 2**31 - 1]
    assert table.top_p_B.tolist() == [1.0, 0.25, 1.0]
    assert table.min_p_B.tolist() == [0.0, 0.125, 0.0]
    np.testing.assert_array_equal(table.key_B2, keys)


def test_a_made_table_has_the_types_of_a_neutral_one():
    """Else a second batch would compile anew."""
    made = make_table([SamplingParams()], request_key(0)[None])
    neutral = neutral_table(1)
    for name in ("temperature_B", "top_k_B", "top_p_B", "min_p_B", "key_B2"):
        one, other = getattr(made, name), getattr(neutral, name)
        assert (one.shape, one.dtype, one.weak_type) == (other.shape, other.dtype, other.weak_type)
    assert neutral.top_p_B.dtype == jnp.float32
    assert neutral.temperature_B.tolist() == [0.0]
