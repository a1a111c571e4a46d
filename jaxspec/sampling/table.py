"""Host. Rows of the `SamplingTable`, the part of sampling parameters that a program reads."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.sampling.params import SamplingParams
from jaxspec.types import SamplingTable


def neutral_table(num_rows: int) -> SamplingTable:
    """Rows that are greedy, unfiltered, unpenalised and have a key of zeros: what an unused row holds."""
    return SamplingTable(
        temperature_B=jnp.zeros((num_rows,), jnp.float32),
        top_k_B=jnp.zeros((num_rows,), jnp.int32),
        top_p_B=jnp.ones((num_rows,), jnp.float32),
        min_p_B=jnp.zeros((num_rows,), jnp.float32),
        presence_B=jnp.zeros((num_rows,), jnp.float32),
        frequency_B=jnp.zeros((num_rows,), jnp.float32),
        repetition_B=jnp.ones((num_rows,), jnp.float32),
        key_B2=jnp.zeros((num_rows, 2), jnp.uint32),
    )


def table_row(params: SamplingParams, key: np.ndarray) -> SamplingTable:
    """One row in plain numpy, its columns without their B; key u32[2]."""
    return SamplingTable(
        temperature_B=np.float32(params.temperature),  # pyright: ignore[reportArgumentType]
        top_k_B=np.int32(min(params.top_k, 2**31 - 1)),  # pyright: ignore[reportArgumentType]
        top_p_B=np.float32(params.top_p),  # pyright: ignore[reportArgumentType]
        min_p_B=np.float32(params.min_p),  # pyright: ignore[reportArgumentType]
        presence_B=np.float32(params.presence_penalty),  # pyright: ignore[reportArgumentType]
        frequency_B=np.float32(params.frequency_penalty),  # pyright: ignore[reportArgumentType]
        repetition_B=np.float32(params.repetition_penalty),  # pyright: ignore[reportArgumentType]
        key_B2=np.asarray(key, np.uint32),  # pyright: ignore[reportArgumentType]
    )


def make_table(params: Sequence[SamplingParams], key_B2: np.ndarray | jax.Array) -> SamplingTable:
    """One row for each request's parameters, with the keys given (u32, `keys.request_key`)."""
    rows = [table_row(one, key) for one, key in zip(params, np.asarray(key_B2), strict=True)]
    return jax.tree.map(lambda *column: jnp.asarray(np.stack(column)), *rows)
