"""Device. From the target's raw logits to a verdict: edits, penalties, rejection, and logprobs where asked for."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec import shards
from jaxspec.pallas_kernels.rejection.penalties import has_penalty
from jaxspec.rejection.verify import verify
from jaxspec.sampling.counts import token_counts
from jaxspec.sampling.edits import edit
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
        verdict = _verify(target, state, batch, drafts, logits_BJV, None)
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
    edited_BJV = edit(
        logits_BJV,
        jax.tree.map(lambda leaf: leaf[rows_B], state.edits),
        context,
        stop_ids_BW=state.stop_ids_RW[rows_B],
        min_len_B=state.min_len_R[rows_B],
        mask_BJU=mask_BJU,
        processors=target.processors,
    )
    B, _, V = logits_BJV.shape
    counts_BV = lax.cond(
        jnp.any(_has_penalty(state)[rows_B]),
        lambda: token_counts(context.history_BC, context.prompt_len_B, context.len_B, shards.whole_size(logits_BJV)),
        lambda: shards.split_like(jnp.zeros((B, V), jnp.int32), logits_BJV),
    )
    verdict = _verify(target, state, batch, drafts, edited_BJV, counts_BV)

    def logprobs() -> TokenLogprobs:
        shown_BJV = logits_BJV
        if target.logprobs_mode.startswith("processed"):
            table = jax.tree.map(lambda leaf: leaf[rows_B], state.table)
            shown_BJV = process(penalise(edited_BJV, table, counts_BV, context.draft_ids_BK), table)
        is_normalised = target.logprobs_mode.endswith("logprobs")
        return token_logprobs(shown_BJV, verdict.token_ids_BJ, num_top=target.max_logprobs, is_normalised=is_normalised)

    nothing = lambda: no_logprobs(B, logits_BJV.shape[1], target.max_logprobs)  # noqa: E731
    return verdict, lax.cond(jnp.any(state.wants_logprobs_R[rows_B]), logprobs, nothing)


def _verify(target: Target, state: DecodeState, batch: Batch, drafts: Drafts, logits_BJV, counts_BV) -> Verdict:
    return verify(
        logits_BJV,
        drafts,
        jax.tree.map(lambda leaf: leaf[batch.rows_B], state.table),
        state.len_R[batch.rows_B],
        counts_BV=counts_BV,
        rule=target.rule,
        synthetic_rates=target.synthetic_rates,
        implementation=target.implementation,
        platform=target.platform,
    )
