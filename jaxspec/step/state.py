"""Device. Everything a decode round reads and writes, as one pytree that every program takes donated and returns."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.sampling.edit_table import EditTable, neutral_edits
from jaxspec.sampling.processors import LogitsProcessor
from jaxspec.sampling.table import neutral_table
from jaxspec.types import Pool, SamplingTable, TokenLogprobs

MAX_STOP_IDS = 64  # EOS and stop ids a row; a request with more is refused by name


@struct.dataclass
class DecodeState:
    """Row tables have R = max_num_seqs + 1 rows: the last is the guard row, which padded batch rows point at.

    A row's target cache holds the keys of positions [0, len - 1): the last committed token is fed by the next round.
    """

    history_RC: jax.Array  # i32, prompt and output tokens; meaningless from len on
    prompt_len_R: jax.Array  # i32, tokens of the prompt among them
    len_R: jax.Array  # i32, committed tokens
    min_len_R: jax.Array  # i32, until the row has this many tokens, EOS and stop ids are masked
    max_len_R: jax.Array  # i32, the row is finished when it has this many
    is_finished_R: jax.Array  # bool, by EOS, stop id or max_len; such a row runs no more
    max_drafts_R: jax.Array  # i32, the most drafts a round makes for the row
    wants_logprobs_R: jax.Array  # bool
    stop_ids_RW: jax.Array  # i32, EOS and stop token ids; -1 = none
    table: SamplingTable  # of R rows
    edits: EditTable  # of R rows
    pool: Pool  # [L*P, 2G, S, H], the target's pages
    proposer: Any  # the proposer's own state


@struct.dataclass
class Batch:
    """The rows of one round, B of them: the only thing the host sends for it."""

    rows_B: jax.Array  # i32, row table indices; the guard row pads
    pages_BM: jax.Array  # i32, -1 = none
    max_drafts: jax.Array  # i32[], the most drafts a row, whatever it may make itself
    survival_BK: jax.Array | None = None  # f32, how often a draft and all before it are kept; None: unweighed
    seconds_W: jax.Array | None = None  # f32, of a round of each width, where drafts are weighed


@struct.dataclass
class RoundOutput:
    """What the host reads of a round, in one array so that one copy brings it.

    packed_BX: i32[B, J + 2]: J tokens (accepted drafts, then the recovered or bonus token, then -1), the number of
    drafts, the number accepted. A row that had finished before the round has no token and no draft. After many rounds
    the axis of rounds comes first.
    """

    packed_BX: jax.Array
    logprobs: TokenLogprobs  # of the J tokens; copied only for rows that asked


def initial_state(
    *,
    max_rows: int,
    max_model_len: int,
    vocab_size: int,
    pool: Pool,
    proposer_state: Any,
    processors: tuple[LogitsProcessor, ...] = (),
) -> DecodeState:
    """A state in which every row is finished and empty."""
    R = max_rows + 1
    return DecodeState(
        history_RC=jnp.zeros((R, max_model_len), jnp.int32),
        prompt_len_R=jnp.zeros(R, jnp.int32),
        len_R=jnp.zeros(R, jnp.int32),
        min_len_R=jnp.zeros(R, jnp.int32),
        max_len_R=jnp.zeros(R, jnp.int32),
        is_finished_R=jnp.ones(R, jnp.bool_),
        max_drafts_R=jnp.zeros(R, jnp.int32),
        wants_logprobs_R=jnp.zeros(R, jnp.bool_),
        stop_ids_RW=jnp.full((R, MAX_STOP_IDS), -1, jnp.int32),
        table=neutral_table(R),
        edits=neutral_edits(R, vocab_size, processors),
        pool=pool,
        proposer=proposer_state,
    )
