"""Device. A small model guesses: one pass over the tokens committed since it last ran, then single steps; or, of a
model trained to fill masks, that one pass alone. Source of the latter: An et al. 2025 (PARD)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache.pages import new_pool
from jaxspec.config.model import ModelConfig
from jaxspec.models.base import Family, Tokens
from jaxspec.proposers.base import Proposer, RowView
from jaxspec.proposers.drawing import SampleMethod, draft_in_steps, drafts_at_once, next_draft, room_for
from jaxspec.proposers.inputs import drafting_columns, tokens_at, with_masks
from jaxspec.types import Drafts, Pool

MOST_PASSES = 32  # over committed tokens in one round, so that no round waits long for a row that fell behind


@struct.dataclass
class DraftModelState:
    """pool: the draft's own pages, same ids as the target's; cached_R: positions [0, cached) of a row hold the keys of
    committed tokens, whatever a rejected draft wrote beyond."""

    pool: Pool  # [L*P, 2G, S, H]
    cached_R: jax.Array  # i32


def to_target_vocabulary(logits_V: jax.Array, target_to_draft_V: jax.Array, is_shared_V: jax.Array) -> jax.Array:
    """A draft's logits over its own vocabulary, the last axis, by the target's ids; -inf for tokens it lacks."""
    return jnp.where(is_shared_V, logits_V[..., target_to_draft_V], -jnp.inf)


def draft_model(
    family: Family,
    config: ModelConfig,
    *,
    num_tokens: int,
    max_model_len: int,
    sample_method: SampleMethod,
    pool_shape: tuple[int, int, int, int],
    pool_dtype: Any,
    has_own_vocabulary: bool = False,
    mask_token_id: int | None = None,
) -> Proposer:
    """A drafting model as a `Proposer`.

    Args:
        family, config: the draft; its weights are `weights["draft"]`.
        num_tokens: K.
        max_model_len: positions the draft may use; a row that reaches it goes on without drafts.
        sample_method: "greedy" drafts are the draft's argmax, a point mass; "probabilistic" ones are drawn from its
            distribution under the row's own sampling parameters, which verification then needs.
        pool_shape, pool_dtype: the draft's page pool.
        has_own_vocabulary: its ids are not the target's; `weights["vocabulary"]` holds `target_to_draft_V`, for each of
            the target's ids the draft's, and `is_shared_V`, which of them can be drafted. Drafting goes by the target's
            ids: q is the draft's distribution over the shared ones, exactly what is drawn from.
        mask_token_id: the draft's token for a place to fill, of a model that drafts all K tokens in one pass (PARD).

    A row that fell behind, in rounds in which nobody drafted, catches up J tokens a pass in the round that asks it
    again, and drafts in that round unless it lacks more than MOST_PASSES * J tokens.
    """
    J = num_tokens + 1

    def init(num_rows: int) -> DraftModelState:
        return DraftModelState(pool=new_pool(pool_shape, pool_dtype), cached_R=jnp.zeros(num_rows, jnp.int32))

    def own_ids(weights, token_ids_BT):
        if not has_own_vocabulary:
            return token_ids_BT
        # Not the target's, or not a token at all behind a row's length: the lookup is clamped.
        return weights["vocabulary"]["target_to_draft_V"].at[token_ids_BT].get(mode="clip")

    def run(weights, pool, token_ids_BT, positions_BT, view_pages_BM):
        tokens = tokens_at(
            token_ids_BT, positions_BT, view_pages_BM, block_size=pool_shape[2], max_model_len=max_model_len
        )
        return family.forward(weights["draft"], config, tokens, pool)

    def logits_of(weights, hidden_BTD) -> jax.Array:
        """Over the target's vocabulary."""
        logits_BTV = family.logits(weights["draft"], config, hidden_BTD)
        return to_target_vocabulary(logits_BTV, **weights["vocabulary"]) if has_own_vocabulary else logits_BTV

    def prefill(weights, state: DraftModelState, rows_B, tokens: Tokens, seen_BTX) -> DraftModelState:
        del seen_BTX
        _, pool = run(weights, state.pool, own_ids(weights, tokens.token_ids_BT), tokens.positions_BT, tokens.pages_BM)
        end_B = jnp.max(tokens.positions_BT, axis=1) + 1
        return DraftModelState(pool=pool, cached_R=state.cached_R.at[rows_B].set(end_B))

    def guess(weights, hidden_B1D, view: RowView, offset) -> tuple[jax.Array, jax.Array | None]:
        return next_draft(logits_of(weights, hidden_B1D)[:, 0], view, offset, sample_method)

    def propose(weights, state: DraftModelState, view: RowView) -> tuple[Drafts, DraftModelState]:
        behind_B = jnp.where(view.is_active_B, view.len_B - state.cached_R[view.rows_B], 0)
        can_draft_B = view.is_active_B & (behind_B <= J * MOST_PASSES)
        counts_B = jnp.where(can_draft_B, room_for(view, max_model_len, num_tokens), 0)
        num_hidden = 1 if mask_token_id is None else num_tokens

        def take_in(carry):
            """The next committed tokens that the draft has not seen, padded to J; and what drafts follow from, of the
            rows that were fed."""
            i, pool, cached_R, kept_BnD = carry
            cached_B = cached_R[view.rows_B]
            behind_B = view.len_B - cached_B
            fed_B = jnp.where(view.is_active_B, jnp.minimum(behind_B, J), 0)
            j_1J = jnp.arange(J, dtype=jnp.int32)[None, :]
            positions_BJ = jnp.where(j_1J < fed_B[:, None], cached_B[:, None] + j_1J, -1)
            token_ids_BJ = jnp.take_along_axis(view.history_BC, jnp.maximum(positions_BJ, 0), axis=1)
            token_ids_BJ = own_ids(weights, token_ids_BJ)
            if mask_token_id is None:
                hidden_BJD, pool = run(weights, pool, token_ids_BJ, positions_BJ, view.pages_BM)
                last_B = jnp.maximum(fed_B - 1, 0)
                hidden_BnD = jnp.take_along_axis(hidden_BJD, last_B[:, None, None], axis=1)
            else:
                masked_B = jnp.where(behind_B <= J, counts_B, 0)  # in a row's last pass
                token_ids_BT, positions_BT = with_masks(
                    token_ids_BJ, positions_BJ, masked_B, mask_token_id=mask_token_id, num_tokens=num_tokens
                )
                hidden_BTD, pool = run(weights, pool, token_ids_BT, positions_BT, view.pages_BM)
                hidden_BnD = drafting_columns(hidden_BTD, positions_BJ)
            # Where nothing was fed (an inactive row) nothing moves; drafts' keys are beyond `cached` and overwritten.
            cached_R = cached_R.at[view.rows_B].set(cached_B + fed_B)
            return i + 1, pool, cached_R, jnp.where((fed_B > 0)[:, None, None], hidden_BnD, kept_BnD)

        def goes_on(carry):
            i, _, cached_R, _ = carry
            behind_B = jnp.where(view.is_active_B, view.len_B - cached_R[view.rows_B], 0)
            return (i == 0) | ((i < MOST_PASSES) & jnp.any(behind_B > 0))

        nothing_BnD = jnp.zeros((view.len_B.shape[0], num_hidden, config.hidden_size), jnp.float32)
        carry = jnp.int32(0), state.pool, state.cached_R, nothing_BnD
        _, pool, cached_R, hidden_BnD = jax.lax.while_loop(goes_on, take_in, carry)
        if mask_token_id is not None:
            drafts = drafts_at_once(logits_of(weights, hidden_BnD), counts_B, view, sample_method)
            return drafts, DraftModelState(pool=pool, cached_R=cached_R)
        first_B, first_logits_BV = guess(weights, hidden_BnD, view, 0)

        def step(pool, token_B, offset):
            position_B = jnp.where(offset <= counts_B - 1, view.len_B + offset - 1, -1)
            own_B1 = own_ids(weights, token_B[:, None])
            hidden_B1D, pool = run(weights, pool, own_B1, position_B[:, None], view.pages_BM)
            return pool, *guess(weights, hidden_B1D, view, offset)

        drafts, pool = draft_in_steps(step, pool, first_B, counts_B, num_tokens, first_logits_BV=first_logits_BV)
        return drafts, DraftModelState(pool=pool, cached_R=cached_R)

    return Proposer(num_tokens, init, prefill, propose, page_lookahead=0)
