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
    """What the target makes of the drafts, each row by its own parameters; log-probabilities where a row asks for them.

    A batch in which no row edits logits or has a penalty has them read where they are. mask_BJU: a grammar's masks
    (u32).
    """
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
    table = jax.tree.map(lambda leaf: leaf[rows_B], state.table)
    any_penalty = jnp.any(has_penalty(table.presence_B, table.frequency_B, table.repetition_B))
    counts_BV = lax.cond(
        any_penalty,
        lambda: token_counts(context.history_BC, context.prompt_len_B, context.len_B, shards.whole_size(logits_BJV)),
        lambda: shards.split_like(jnp.zeros((B, V), jnp.int32), logits_BJV),
    )
    has_own_edits = mask_BJU is not None or target.processors
    verdict = verify(
        logits_BJV,
        drafts,
        table,
        context.len_B,
        counts_BV,
        edit,
        None if has_own_edits else ~(any_penalty | _has_edit(state, rows_B)),
        rule=target.rule,
        synthetic_rates=target.synthetic_rates,
        implementation=target.implementation,
        platform=target.platform,
    )

    def add_logprobs(j: jax.Array, logprobs: TokenLogprobs) -> TokenLogprobs:
        shown_BV = lax.dynamic_index_in_dim(logits_BJV, j, axis=1, keepdims=False)
        if target.logprobs_mode.startswith("processed"):
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


def _has_edit(state: DecodeState, rows_B: jax.Array) -> jax.Array:
    edits = state.edits
    has_edit_R = edits.has_bias_B | edits.has_allowed_B | edits.has_bad_words_B | (state.min_len_R > state.len_R)
    return jnp.any(has_edit_R[rows_B])
