"""Device. The two programs that bring a request in: its row is set, then its prompt fills the cache chunk by chunk."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache.pages import slots_of
from jaxspec.models.base import Tokens
from jaxspec.proposers.base import Proposer
from jaxspec.step.rounds import Target
from jaxspec.step.state import DecodeState
from jaxspec.types import SamplingTable


@struct.dataclass
class Admission:
    """One request's row, as the host sends it (step/pack.py)."""

    row: jax.Array  # i32[]
    history_C: jax.Array  # i32, the prompt, then zeros
    lengths_3: jax.Array  # i32: tokens in the prompt, min_len, max_len
    stop_ids_W: jax.Array  # i32, -1 = none
    sampling: SamplingTable  # of this row alone: its columns have no B


def admit(state: DecodeState, admission: Admission) -> DecodeState:
    """Set every table of the row; whatever the row held before is forgotten."""
    row, (num_prompt, min_len, max_len) = admission.row, admission.lengths_3
    return dataclasses.replace(
        state,
        history_RC=state.history_RC.at[row].set(admission.history_C),
        len_R=state.len_R.at[row].set(num_prompt),
        min_len_R=state.min_len_R.at[row].set(min_len),
        max_len_R=state.max_len_R.at[row].set(max_len),
        is_finished_R=state.is_finished_R.at[row].set(False),
        stop_ids_RW=state.stop_ids_RW.at[row].set(admission.stop_ids_W),
        table=jax.tree.map(lambda column, value: column.at[row].set(value), state.table, admission.sampling),
    )


@struct.dataclass
class Chunk:
    """Tokens [start, start + num_tokens) of one row's prompt; num_tokens is at most the program's T, and may be 0."""

    row: jax.Array  # i32[]
    start: jax.Array  # i32[]
    num_tokens: jax.Array  # i32[]
    pages_M: jax.Array  # i32, -1 = none


def prefill(
    target: Target, proposer: Proposer, bucket_tokens: int, weights: Any, state: DecodeState, chunk: Chunk
) -> DecodeState:
    """Fill the target's and the proposer's caches with a chunk of a prompt, padded to T = bucket_tokens.

    Nothing is sampled: a prompt's last token is left to the first decode round, so that every token of an answer
    comes out of the same program.
    """
    t_1T = jnp.arange(bucket_tokens, dtype=jnp.int32)[None, :]
    positions_1T = jnp.where(t_1T < chunk.num_tokens, chunk.start + t_1T, -1)
    history_C = state.history_RC[chunk.row]
    tokens = Tokens(
        token_ids_BT=jnp.where(positions_1T >= 0, history_C[jnp.maximum(positions_1T, 0)], 0),
        positions_BT=positions_1T,
        slots_BT=slots_of(positions_1T, chunk.pages_M[None, :], state.pool.shape[2]),
        pages_BM=chunk.pages_M[None, :],
    )
    hidden_1TD, pool = target.family.forward(weights["target"], target.config, tokens, state.pool)
    proposer_state = proposer.prefill(weights, state.proposer, chunk.row[None], tokens, hidden_1TD)
    return dataclasses.replace(state, pool=pool, proposer=proposer_state)
