"""Device. Several multi-token-prediction modules: each guesses one token further, from the state of the one before.

Module k's entry at position t pairs the state of module k - 1 there (module 0: the target's) with the token at
t + k + 1, and attends to the module's own entries. The entries of the last k positions before the last token are made
with drafts, and made again once tokens stand there: a round takes in as many positions twice. Drafts beyond the last
module's are its own, over its own states. Source: DeepSeek-V3's report, section 2.2; of the rest, vLLM, which asks for
as many drafts as modules, or a multiple.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache.pages import new_pool
from jaxspec.config.heads import MtpConfig
from jaxspec.models.base import Tokens
from jaxspec.models.heads import mtp as head
from jaxspec.models.heads.base import head_logits
from jaxspec.proposers.base import Proposer, RowView
from jaxspec.proposers.drawing import SampleMethod, draft_in_steps, next_draft, room_for
from jaxspec.proposers.inputs import tokens_at
from jaxspec.types import Drafts, Pool


@struct.dataclass
class ModulesState:
    """Of each row the target's states at positions [first - (n - 1), first + count), n modules drafting: those from
    first on are new.

    begin_R: the first position that the row's own prefill saw; entries before it lie in pages it shares, and are right.
    token_ids_Rk: the last n - 1 tokens of what was prefilled; meaningless once the row decodes.
    """

    pool: Pool  # [L*P, 2G, S, H], module k in the place of layer k
    states_RWX: jax.Array  # f32, W = n - 1 + J
    first_R: jax.Array  # i32
    count_R: jax.Array  # i32, 0..J
    begin_R: jax.Array  # i32
    token_ids_Rk: jax.Array  # i32


def mtp_modules(
    config: MtpConfig,
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
    """The modules as a `Proposer`, of which fewer drafts than modules need but the first; arguments as `eagle` takes
    them."""
    K, n = num_tokens, min(num_tokens, config.num_modules)
    old = n - 1
    limits = {"block_size": pool_shape[2], "max_model_len": max_model_len}
    own_part = slice(hidden_size, None) if config.aux_streams else slice(None)

    def init(num_rows: int) -> ModulesState:
        return ModulesState(
            pool=new_pool(pool_shape, pool_dtype),
            states_RWX=jnp.zeros((num_rows, old + K + 1, hidden_size), jnp.float32),
            first_R=jnp.zeros(num_rows, jnp.int32),
            count_R=jnp.zeros(num_rows, jnp.int32),
            begin_R=jnp.zeros(num_rows, jnp.int32),
            token_ids_Rk=jnp.zeros((num_rows, old), jnp.int32),
        )

    def prefill(weights, state: ModulesState, rows_B, tokens: Tokens, seen_BTX) -> ModulesState:
        """The window begins n positions before the chunk, whose last position waits for the next token."""
        num_B = jnp.sum((tokens.positions_BT >= 0).astype(jnp.int32), axis=1)
        start_B = jnp.maximum(tokens.positions_BT[:, 0], 0)
        end_B = start_B + num_B
        states_BTX = jnp.concatenate([state.states_RWX[rows_B, :n], seen_BTX[:, :, own_part]], axis=1)
        ids_BT = jnp.concatenate([state.token_ids_Rk[rows_B], tokens.token_ids_BT], axis=1)
        w_1W = jnp.arange(ids_BT.shape[1], dtype=jnp.int32)[None, :]
        positions_BW = start_B[:, None] - n + w_1W
        follows_B = state.first_R[rows_B] + state.count_R[rows_B] == start_B
        begin_B = jnp.where(follows_B, state.begin_R[rows_B], start_B)
        is_known_BW = positions_BW >= begin_B[:, None]
        features_BWX, pool = states_BTX[:, :-1], state.pool
        for k in range(n):
            is_fed_BW = is_known_BW & (positions_BW + k + 1 < end_B[:, None])
            ids_BW = jnp.pad(ids_BT[:, k:], ((0, 0), (0, k)))
            features_BWX = jnp.where(is_fed_BW[:, :, None], features_BWX, 0.0)
            fed = tokens_at(ids_BW, jnp.where(is_fed_BW, positions_BW, -1), tokens.pages_BM, **limits)
            _, features_BWX, pool = head.forward(weights["draft"]["modules"][k], config, fed, features_BWX, pool, k)

        def last(x_BT, size: int):
            """What ends with the chunk's last token, with `size` positions; each array's first are before the chunk."""
            at_BS = num_B[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
            return jnp.take_along_axis(x_BT, at_BS.reshape(at_BS.shape + (1,) * (x_BT.ndim - 2)), axis=1)

        count_B = jnp.minimum(num_B, 1)
        return ModulesState(
            pool=pool,
            states_RWX=state.states_RWX.at[rows_B, :n].set(last(states_BTX, n)),
            first_R=state.first_R.at[rows_B].set(end_B - count_B),
            count_R=state.count_R.at[rows_B].set(count_B),
            begin_R=state.begin_R.at[rows_B].set(begin_B),
            token_ids_Rk=state.token_ids_Rk.at[rows_B].set(last(ids_BT, old)),
        )

    def guess(weights, k: int, hidden_BD, view: RowView, offset) -> tuple[jax.Array, jax.Array | None]:
        own = weights["draft"]["modules"][k]
        hidden_B1D = hidden_BD[:, None]
        logits_B1V = (
            head_logits(own["head"], hidden_B1D) if "head" in own else target_logits(weights["target"], hidden_B1D)
        )
        return next_draft(logits_B1V[:, 0], view, offset, sample_method, vocab_size=vocab_size)

    def propose(weights, state: ModulesState, view: RowView) -> tuple[Drafts, ModulesState]:
        first_B, count_B = state.first_R[view.rows_B], state.count_R[view.rows_B]
        can_draft_B = view.is_active_B & (first_B + count_B == view.len_B - 1) & (count_B > 0)
        w_1W = jnp.arange(state.states_RWX.shape[1], dtype=jnp.int32)[None, :]
        positions_BW = first_B[:, None] - old + w_1W
        is_known_BW = (positions_BW >= state.begin_R[view.rows_B][:, None]) & (w_1W < old + count_B[:, None])
        is_fed_BW = is_known_BW & can_draft_B[:, None]
        positions_BW = jnp.where(is_fed_BW, positions_BW, -1)
        # The row's tokens, and behind them the drafts as they come.
        text_BC = jnp.pad(view.history_BC, ((0, 0), (0, n)))
        features_BWX = jnp.where(is_fed_BW[:, :, None], state.states_RWX[view.rows_B], 0.0)
        last_B11 = jnp.maximum(old + count_B - 1, 0)[:, None, None]
        pool, drafts = state.pool, []
        for k in range(n):
            ids_BW = jnp.take_along_axis(text_BC, jnp.where(is_fed_BW, positions_BW + k + 1, 0), axis=1)
            fed = tokens_at(ids_BW, positions_BW, view.pages_BM, **limits)
            hidden_BWD, features_BWX, pool = head.forward(
                weights["draft"]["modules"][k], config, fed, features_BWX, pool, k
            )
            drafts.append(guess(weights, k, jnp.take_along_axis(hidden_BWD, last_B11, axis=1)[:, 0], view, k))
            rows_b = jnp.arange(text_BC.shape[0], dtype=jnp.int32)
            text_BC = text_BC.at[rows_b, view.len_B + k].set(drafts[-1][0], mode="drop")
        counts_B = jnp.where(can_draft_B, room_for(view, max_model_len, K), 0)

        def step(carry, token_B, offset):
            """The last module again, a position further, over its own state for that of the module before it."""
            state_BX, pool = carry
            position_B = jnp.where(offset < counts_B, view.len_B + offset - (n + 1), -1)
            fed = tokens_at(token_B[:, None], position_B[:, None], view.pages_BM, **limits)
            hidden_B1D, state_B1X, pool = head.forward(
                weights["draft"]["modules"][old], config, fed, state_BX[:, None], pool, old
            )
            return (state_B1X[:, 0], pool), *guess(weights, old, hidden_B1D[:, 0], view, offset)

        *before, (token_B, logits_BV) = drafts
        state_BX = jnp.take_along_axis(features_BWX, last_B11, axis=1)[:, 0]
        drafts, (_, pool) = draft_in_steps(
            step, (state_BX, pool), token_B, counts_B, K, first_logits_BV=logits_BV, before=before
        )
        return drafts, dataclasses.replace(state, pool=pool)

    def commit(state: ModulesState, view: RowView, seen_BJX, num_kept_B) -> ModulesState:
        """What was new is taken in; the last n - 1 of it and of what came before stay."""
        rows_B = jnp.where(view.is_active_B, view.rows_B, state.first_R.shape[0])  # past the end: dropped
        count_B = state.count_R[view.rows_B]
        at_BS = count_B[:, None] + jnp.arange(old, dtype=jnp.int32)[None, :]
        kept_BSX = jnp.take_along_axis(state.states_RWX[view.rows_B], at_BS[:, :, None], axis=1)
        states_BWX = jnp.concatenate([kept_BSX, seen_BJX[:, :, own_part]], axis=1)
        return dataclasses.replace(
            state,
            states_RWX=state.states_RWX.at[rows_B, : states_BWX.shape[1]].set(states_BWX, mode="drop"),
            first_R=state.first_R.at[rows_B].set(view.len_B - 1, mode="drop"),
            count_R=state.count_R.at[rows_B].set(num_kept_B, mode="drop"),
        )

    def forget(state: ModulesState, row) -> ModulesState:
        """No chunk follows what the row held before."""
        return dataclasses.replace(state, first_R=state.first_R.at[row].set(-1), count_R=state.count_R.at[row].set(0))

    return Proposer(
        K, init, prefill, propose, commit, config.aux_streams, page_lookahead=n, forget=forget, sees_plain_rounds=True
    )
