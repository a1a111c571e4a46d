"""Device. EAGLE, EAGLE-3 and multi-token prediction: a head over the target's states guesses, step by step.

The head's entry at position t pairs the target's state there with the token at t + 1. A round's first pass takes in
the positions committed since; each further step pairs the head's own state with its last draft. A head with a mask
token makes all drafts in that first pass, in which masks stand for the drafts, and a learned state for the target's.
Source of the latter: Hui et al. 2026 (P-EAGLE).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache.pages import new_pool
from jaxspec.models.base import Tokens
from jaxspec.models.heads.base import RecurrentHead, head_logits
from jaxspec.proposers.base import Proposer, RowView
from jaxspec.proposers.drawing import SampleMethod, draft_in_steps, drafts_at_once, next_draft, room_for
from jaxspec.proposers.inputs import drafting_columns, tokens_at, with_masks
from jaxspec.proposers.seen import Seen, forget_row, nothing_seen, see_prompt, see_round, to_take_in
from jaxspec.types import Drafts, Pool


@struct.dataclass
class EagleState:
    """pool: the head's own pages, same ids as the target's; entries beyond what was taken in are overwritten."""

    pool: Pool  # [L*P, 2G, S, H]
    seen: Seen


def eagle(
    head: RecurrentHead,
    config: Any,
    *,
    target_logits: Callable[[Any, jax.Array], jax.Array],
    hidden_size: int,
    vocab_size: int,
    num_tokens: int,
    max_model_len: int,
    sample_method: SampleMethod,
    pool_shape: tuple[int, int, int, int],
    pool_dtype: Any,
) -> Proposer:
    """A recurrent head as a `Proposer`; its weights are `weights["draft"]`.

    Args:
        head, config: the head.
        target_logits: (the target's weights, hidden_BTD) -> logits_BTV, for a head without a vocabulary of its own.
        hidden_size, vocab_size: the target's.
        num_tokens: K.
        max_model_len: positions the head may use; a row that reaches it goes on without drafts.
        sample_method: "greedy" drafts are the arg-max, a point mass; "probabilistic" ones are drawn under the row's
            own sampling parameters.
        pool_shape, pool_dtype: the head's page pool.
    """
    reads_streams = bool(config.aux_streams)
    mask_token_id: int | None = getattr(config, "mask_token_id", None)
    # Without streams the head reads the hidden state alone, with them the streams alone, which stand behind it.
    size = (
        getattr(config, "target_hidden_size", hidden_size) * len(config.aux_streams) if reads_streams else hidden_size
    )

    def of_interest(seen_BTX: jax.Array) -> jax.Array:
        return seen_BTX[:, :, hidden_size:] if reads_streams else seen_BTX

    def init(num_rows: int) -> EagleState:
        return EagleState(pool=new_pool(pool_shape, pool_dtype), seen=nothing_seen(num_rows, num_tokens + 1, size))

    def run(weights, pool, token_ids_BT, positions_BT, pages_BM, features_BTD):
        tokens = tokens_at(token_ids_BT, positions_BT, pages_BM, block_size=pool_shape[2], max_model_len=max_model_len)
        return head.forward(weights["draft"], config, tokens, features_BTD, pool)

    def prefill(weights, state: EagleState, rows_B, tokens: Tokens, seen_BTX) -> EagleState:
        """The chunk's tokens are what follows the positions before them: the last of the chunk before, and all but
        the last of its own, which waits for the next."""
        seen_BTX = of_interest(seen_BTX)
        seen = state.seen
        before_B = tokens.positions_BT[:, 0] - 1
        follows_B = (seen.count_R[rows_B] == 1) & (seen.first_R[rows_B] == before_B)
        positions_BT = jnp.maximum(tokens.positions_BT, 0) - 1
        positions_BT = positions_BT.at[:, 0].set(jnp.where(follows_B, positions_BT[:, 0], -1))
        waited_B1X = jnp.where(follows_B[:, None], seen.states_RJX[rows_B, 0], 0.0)[:, None]
        shifted_BTX = jnp.concatenate([waited_B1X, seen_BTX[:, :-1]], axis=1)
        features_BTD = head.features(weights["draft"], config, shifted_BTX)
        _, _, pool = run(weights, state.pool, tokens.token_ids_BT, positions_BT, tokens.pages_BM, features_BTD)
        return EagleState(pool=pool, seen=see_prompt(seen, rows_B, tokens, seen_BTX, keep=1))

    def logits_of(weights, hidden_BTD) -> jax.Array:
        own = weights["draft"]
        if "head" in own:
            return head_logits(own["head"], hidden_BTD, getattr(config, "logit_scale", 1.0))
        return target_logits(weights["target"], hidden_BTD)

    def guess(weights, hidden_BD, view: RowView, offset) -> tuple[jax.Array, jax.Array | None]:
        return next_draft(
            logits_of(weights, hidden_BD[:, None])[:, 0],
            view,
            offset,
            sample_method,
            target_ids_V=weights["draft"].get("target_ids"),
            vocab_size=vocab_size,
        )

    def propose(weights, state: EagleState, view: RowView) -> tuple[Drafts, EagleState]:
        states_BJX, positions_BJ, is_ready_B = to_take_in(state.seen, view)
        next_BJ = jnp.minimum(positions_BJ + 1, view.history_BC.shape[1] - 1)
        token_ids_BJ = jnp.take_along_axis(view.history_BC, next_BJ, axis=1)
        features_BJD = head.features(weights["draft"], config, states_BJX)
        count_B = jnp.sum((positions_BJ >= 0).astype(jnp.int32), axis=1)
        counts_B = jnp.where(is_ready_B & (count_B > 0), room_for(view, max_model_len, num_tokens), 0)

        if mask_token_id is not None:
            token_ids_BT, positions_BT = with_masks(
                token_ids_BJ, positions_BJ, counts_B, mask_token_id=mask_token_id, num_tokens=num_tokens
            )
            mask_11D = head.features(weights["draft"], config, weights["draft"]["mask_hidden"][None, None])
            B, _, D = features_BJD.shape
            masks_BkD = jnp.broadcast_to(mask_11D, (B, num_tokens - 1, D))
            features_BTD = jnp.concatenate([features_BJD, masks_BkD], axis=1)
            hidden_BTD, _, pool = run(weights, state.pool, token_ids_BT, positions_BT, view.pages_BM, features_BTD)
            logits_BKV = logits_of(weights, drafting_columns(hidden_BTD, positions_BJ))
            vocabulary = {"target_ids_V": weights["draft"].get("target_ids"), "vocab_size": vocab_size}
            drafts = drafts_at_once(logits_BKV, counts_B, view, sample_method, **vocabulary)
            return drafts, EagleState(pool=pool, seen=state.seen)

        hidden_BJD, out_BJD, pool = run(weights, state.pool, token_ids_BJ, positions_BJ, view.pages_BM, features_BJD)
        last_B11 = jnp.maximum(count_B - 1, 0)[:, None, None]
        hidden_BD, out_BD = (jnp.take_along_axis(x, last_B11, axis=1)[:, 0] for x in (hidden_BJD, out_BJD))
        first_B, first_logits_BV = guess(weights, hidden_BD, view, 0)

        def step(carry, token_B, offset):
            out_BD, pool = carry
            # Draft `offset` follows from the one before it, which stands at len + offset - 1.
            position_B = jnp.where(offset <= counts_B - 1, view.len_B + offset - 2, -1)
            hidden_B1D, out_B1D, pool = run(
                weights, pool, token_B[:, None], position_B[:, None], view.pages_BM, out_BD[:, None]
            )
            return (out_B1D[:, 0], pool), *guess(weights, hidden_B1D[:, 0], view, offset)

        drafts, (_, pool) = draft_in_steps(
            step, (out_BD, pool), first_B, counts_B, num_tokens, first_logits_BV=first_logits_BV
        )
        return drafts, EagleState(pool=pool, seen=state.seen)

    def commit(state: EagleState, view: RowView, seen_BJX, num_kept_B) -> EagleState:
        return EagleState(pool=state.pool, seen=see_round(state.seen, view, of_interest(seen_BJX), num_kept_B))

    def forget(state: EagleState, row) -> EagleState:
        """The row's first chunk may begin behind shared pages, whose last entry is made already."""
        return EagleState(pool=state.pool, seen=forget_row(state.seen, row))

    return Proposer(
        num_tokens,
        init,
        prefill,
        propose,
        commit,
        config.aux_streams,
        page_lookahead=1,
        forget=forget,
        sees_plain_rounds=True,
    )
