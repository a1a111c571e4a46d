"""Device. From the target's raw logits to a verdict: edits, penalties, rejection, and logprobs where asked for."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec import shards
from jaxspec.pallas_kernels.rejection.penalties import has_penalty
from jaxspec.rejection.verify import verify
from jaxspec.sampling.counts import token_counts
from jaxspec.sampling.edits import RowEdits
from jaxspec.sampling.logits import penalise, process
from jaxspec.sampling.logprobs import no_logprobs, token_logprobs
from jaxspec.sampling.processors import TokenContext
from jaxspec.step.state import Batch, DecodeState
from jaxspec.step.target import Target
from jaxspec.types import Drafts, TokenLogprobs, Verdict


def judge(
    target: Target,
    state: DecodeState,
    batch: Batch,
    drafts: Drafts,
    logits_BJV: jax.Array,
    mask_BJU: jax.Array | None = None,
) -> tuple[Verdict, TokenLogprobs]:
    """What the target makes of the drafts, each row by its own parameters.

    A batch in which no row edits logits, has a penalty or asks for log-probabilities takes the lean way, which reads
    the logits where they are. mask_BJU: a grammar's masks (u32); with them the way is the full one.
    """

    def lean(logits_BJV: jax.Array) -> tuple[Verdict, TokenLogprobs]:
        verdict = _verify(target, state, batch, drafts, logits_BJV)
        return verdict, no_logprobs(logits_BJV.shape[0], logits_BJV.shape[1], target.max_logprobs)

    def full(logits_BJV: jax.Array) -> tuple[Verdict, TokenLogprobs]:
        return _judge_fully(target, state, batch, drafts, logits_BJV, mask_BJU)

    if mask_BJU is not None or target.processors:
        return full(logits_BJV)
    return lax.cond(_needs_full(state, batch), full, lean, logits_BJV)


def _needs_full(state: DecodeState, batch: Batch) -> jax.Array:
    edits = state.edits
    has_edit_R = edits.has_bias_B | edits.has_allowed_B | edits.has_bad_words_B | (state.min_len_R > state.len_R)
    return jnp.any((has_edit_R | _has_penalty(state) | state.wants_logprobs_R)[batch.rows_B])


def _has_penalty(state: DecodeState) -> jax.Array:
    table = state.table
    return has_penalty(table.presence_B, table.frequency_B, table.repetition_B)


def _judge_fully(target: Target, state: DecodeState, batch: Batch, drafts: Drafts, logits_BJV, mask_BJU):
    rows_B = batch.rows_B
    is_draft_BK = jnp.arange(drafts.token_ids_BK.shape[1], dtype=jnp.int32)[None] < drafts.counts_B[:, None]
    context = TokenContext(
        history_BC=state.history_RC[rows_B],
        prompt_len_B=state.prompt_len_R[rows_B],
        len_B=state.len_R[rows_B],
        draft_ids_BK=jnp.where(is_draft_BK, drafts.token_ids_BK, -1),
    )
    B, J, V = logits_BJV.shape
    edit = RowEdits(
        jax.tree.map(lambda leaf: leaf[rows_B], state.edits),
        context,
        state.stop_ids_RW[rows_B],
        state.min_len_R[rows_B],
        mask_BJU,
        num_positions=J,
        processors=target.processors,
    )
    counts_BV = lax.cond(
        jnp.any(_has_penalty(state)[rows_B]),
        lambda: token_counts(context.history_BC, context.prompt_len_B, context.len_B, shards.whole_size(logits_BJV)),
        lambda: shards.split_like(jnp.zeros((B, V), jnp.int32), logits_BJV),
    )
    verdict = _verify(target, state, batch, drafts, logits_BJV, counts_BV, edit)

    def add_logprobs(j: jax.Array, logprobs: TokenLogprobs) -> TokenLogprobs:
        shown_BV = lax.dynamic_index_in_dim(logits_BJV, j, axis=1, keepdims=False)
        if target.logprobs_mode.startswith("processed"):
            table = jax.tree.map(lambda leaf: leaf[rows_B], state.table)
            edited_BV = edit(shown_BV, jnp.arange(B, dtype=jnp.int32) * J + j)
            shown_BV = process(penalise(edited_BV, table, counts_BV, context.draft_ids_BK, j)[:, None], table)[:, 0]
        token_ids_B1 = lax.dynamic_slice_in_dim(verdict.token_ids_BJ, j, 1, axis=1)
        is_normalised = target.logprobs_mode.endswith("logprobs")
        found = token_logprobs(
            shown_BV[:, None], token_ids_B1, num_top=target.max_logprobs, is_normalised=is_normalised
        )
        return jax.tree.map(lambda all_, one: lax.dynamic_update_slice_in_dim(all_, one, j, axis=1), logprobs, found)

    num_shown = jnp.where(jnp.any(state.wants_logprobs_R[rows_B]), jnp.max(verdict.num_accepted_B) + 1, 0)
    nothing = no_logprobs(B, J, target.max_logprobs)
    return verdict, lax.fori_loop(0, num_shown, add_logprobs, nothing)


def _verify(
    target: Target, state: DecodeState, batch: Batch, drafts: Drafts, logits_BJV, counts_BV=None, edit=None
) -> Verdict:
    return verify(
        logits_BJV,
        drafts,
        jax.tree.map(lambda leaf: leaf[batch.rows_B], state.table),
        state.len_R[batch.rows_B],
        counts_BV,
        edit,
        rule=target.rule,
        synthetic_rates=target.synthetic_rates,
        implementation=target.implementation,
        platform=target.platform,
    )
