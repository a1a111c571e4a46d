"""Device. The two programs that bring a request in: its row is set, then its prompt fills the cache chunk by chunk."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache.pages import slots_of
from jaxspec.models.base import Tokens
from jaxspec.proposers.base import Proposer
from jaxspec.sampling.edit_table import EditTable
from jaxspec.sampling.logprobs import token_logprobs
from jaxspec.step.state import DecodeState
from jaxspec.step.target import Target
from jaxspec.types import SamplingTable, TokenLogprobs


@struct.dataclass
class Admission:
    """One request's row, as the host sends it (step/pack.py)."""

    row: jax.Array  # i32[]
    history_C: jax.Array  # i32, the committed tokens, then zeros
    limits_5: jax.Array  # i32: committed tokens, those of the prompt, min_len, max_len, max_drafts
    wants_logprobs: jax.Array  # bool[]
    stop_ids_W: jax.Array  # i32, -1 = none
    sampling: SamplingTable  # of this row alone: its columns have no B
    edits: EditTable  # likewise


def admit(proposer: Proposer, state: DecodeState, admission: Admission) -> DecodeState:
    """Set every table of the row; whatever the row held before is forgotten. One that goes on with an answer has more
    committed tokens than its prompt's, and nothing else tells it from one that begins."""
    row, (length, num_prompt, min_len, max_len, max_drafts) = admission.row, admission.limits_5

    def set_row(table, values):
        return jax.tree.map(lambda column, value: column.at[row].set(value), table, values)

    return dataclasses.replace(
        state,
        history_RC=state.history_RC.at[row].set(admission.history_C),
        prompt_len_R=state.prompt_len_R.at[row].set(num_prompt),
        len_R=state.len_R.at[row].set(length),
        min_len_R=state.min_len_R.at[row].set(min_len),
        max_len_R=state.max_len_R.at[row].set(max_len),
        is_finished_R=state.is_finished_R.at[row].set(False),
        max_drafts_R=state.max_drafts_R.at[row].set(max_drafts),
        wants_logprobs_R=state.wants_logprobs_R.at[row].set(admission.wants_logprobs),
        stop_ids_RW=state.stop_ids_RW.at[row].set(admission.stop_ids_W),
        table=set_row(state.table, admission.sampling),
        edits=set_row(state.edits, admission.edits),
        proposer=state.proposer if proposer.forget is None else proposer.forget(state.proposer, row),
    )


@struct.dataclass
class Chunk:
    """Tokens [start, start + num_tokens) of one row's committed ones; num_tokens is at most the program's T, and may
    be 0. A row's first chunk may start behind pages that are filled already."""

    row: jax.Array  # i32[]
    start: jax.Array  # i32[]
    num_tokens: jax.Array  # i32[]
    pages_M: jax.Array  # i32, -1 = none


def prefill(
    target: Target, proposer: Proposer, bucket_tokens: int, weights: Any, state: DecodeState, chunk: Chunk
) -> tuple[DecodeState, jax.Array]:
    """Fill the target's and the proposer's caches with a chunk of a prompt, padded to T = bucket_tokens.

    Nothing is sampled: a prompt's last token is left to the first decode round, so that every token of an answer
    comes out of the same program.

    Returns:
        The state, and the target's hidden states [1, T, D], of which `prompt_logprobs` are made.
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
    seen_1TX, pool = target.family.forward(weights["target"], target.config, tokens, state.pool, proposer.aux_streams)
    proposer_state = proposer.prefill(weights, state.proposer, chunk.row[None], tokens, seen_1TX)
    return dataclasses.replace(state, pool=pool, proposer=proposer_state), hidden_of(target, proposer, seen_1TX)


def hidden_of(target: Target, proposer: Proposer, seen_BTX: jax.Array) -> jax.Array:
    """The hidden states, before the streams that the proposer asked for."""
    return seen_BTX[:, :, : target.config.hidden_size] if proposer.aux_streams else seen_BTX


def prompt_logprobs(target: Target, weights: Any, hidden_1TD: jax.Array, token_ids_1T: jax.Array) -> TokenLogprobs:
    """Of tokens under the model alone, from the hidden states of the tokens before them: axes [1, T].

    T is few, whatever the chunk's was: no array of logits is as long as a prompt.
    """
    logits_1TV = target.family.logits(weights["target"], target.config, hidden_1TD)
    is_normalised = target.logprobs_mode.endswith("logprobs")
    return token_logprobs(logits_1TV, token_ids_1T, num_top=target.max_logprobs, is_normalised=is_normalised)
