"""Host. Fills a `SamplingTable`, the part of sampling parameters that a program reads."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.sampling.params import SamplingParams
from jaxspec.types import SamplingTable as SamplingTable


def neutral_table(num_rows: int) -> SamplingTable:
    """Rows that are greedy, unfiltered and have a key of zeros: what an unused row holds."""
    return SamplingTable(
        temperature_B=jnp.zeros((num_rows,), jnp.float32),
        top_k_B=jnp.zeros((num_rows,), jnp.int32),
        top_p_B=jnp.ones((num_rows,), jnp.float32),
        min_p_B=jnp.zeros((num_rows,), jnp.float32),
        key_B2=jnp.zeros((num_rows, 2), jnp.uint32),
    )


def make_table(params: Sequence[SamplingParams], key_B2: np.ndarray | jax.Array) -> SamplingTable:
    """One row for each request's parameters, with the keys given (u32, `keys.request_key`)."""
    return SamplingTable(
        temperature_B=jnp.asarray([0.0 if one.is_greedy else one.temperature for one in params], jnp.float32),
        top_k_B=jnp.asarray([min(one.top_k, 2**31 - 1) for one in params], jnp.int32),
        top_p_B=jnp.asarray([one.top_p for one in params], jnp.float32),
        min_p_B=jnp.asarray([one.min_p for one in params], jnp.float32),
        key_B2=jnp.asarray(key_B2, jnp.uint32),
    )
