"""Device. DFlash and DSpark: keys of committed positions, made of the target's streams; then one pass over a block of
masks, and of DSpark a walk along it, in which each draft hears of the one before."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec import shards
from jaxspec.cache.pages import new_pool
from jaxspec.config.heads import DflashConfig
from jaxspec.models.base import Tokens
from jaxspec.models.heads import dflash as head
from jaxspec.models.heads import markov
from jaxspec.models.heads.base import head_logits
from jaxspec.proposers.base import Proposer, RowView
from jaxspec.proposers.drawing import SampleMethod, drafts_at_once, joined, next_draft, room_for
from jaxspec.proposers.inputs import tokens_at
from jaxspec.proposers.seen import Seen, nothing_seen, see_prompt, see_round, to_take_in
from jaxspec.types import Drafts, Pool


@struct.dataclass
class DflashState:
    """pool: keys and values of the positions taken in; a block's own lie behind them and are overwritten."""

    pool: Pool  # [L*P, 2G, S, H]
    seen: Seen


def dflash(
    config: DflashConfig,
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
    """The block of one token and K masks as a `Proposer`, or of K - 1 masks where the token's own place makes the first
    draft; arguments as `eagle` takes them.

    A row without room for a whole block drafts nothing: a block sees all of itself, and half a block says other things.
    """
    num_masks = num_tokens - 1 if config.sample_from_anchor else num_tokens
    place = functools.partial(tokens_at, block_size=pool_shape[2], max_model_len=max_model_len)

    def init(num_rows: int) -> DflashState:
        size = config.target_hidden_size * len(config.aux_streams)
        return DflashState(pool=new_pool(pool_shape, pool_dtype), seen=nothing_seen(num_rows, num_tokens + 1, size))

    def prefill(weights, state: DflashState, rows_B, tokens: Tokens, seen_BTX) -> DflashState:
        streams_BTX = seen_BTX[:, :, hidden_size:]
        placed = place(tokens.token_ids_BT, tokens.positions_BT, tokens.pages_BM)
        pool = head.remember(weights["draft"], config, placed, streams_BTX, state.pool)
        return DflashState(pool=pool, seen=see_prompt(state.seen, rows_B, tokens, streams_BTX, keep=0))

    def propose(weights, state: DflashState, view: RowView) -> tuple[Drafts, DflashState]:
        own = weights["draft"]
        streams_BJX, positions_BJ, is_ready_B = to_take_in(state.seen, view)
        nothing_BJ = jnp.zeros_like(positions_BJ)
        pool = head.remember(own, config, place(nothing_BJ, positions_BJ, view.pages_BM), streams_BJX, state.pool)
        # A short row has room for the block: its pages reach to max_len, the token after its last draft included.
        whole = dataclasses.replace(view, max_drafts_B=None)
        counts_B = jnp.where(is_ready_B, room_for(whole, max_model_len, num_tokens), 0)
        counts_B = jnp.where(counts_B == num_tokens, counts_B, 0)
        if view.max_drafts_B is not None:  # fewer are cut from a whole block
            counts_B = jnp.where(view.max_drafts_B > 0, counts_B, 0)
        j_1T = jnp.arange(num_masks + 1, dtype=jnp.int32)[None, :]
        last_B1 = jnp.take_along_axis(view.history_BC, jnp.maximum(view.len_B - 1, 0)[:, None], axis=1)
        ids_BT = jnp.where(j_1T == 0, last_B1, config.mask_token_id)
        block_BT = jnp.where((counts_B > 0)[:, None], view.len_B[:, None] - 1 + j_1T, -1)
        hidden_BTD, pool = head.forward(own, config, place(ids_BT, block_BT, view.pages_BM), pool)
        hidden_BKD = hidden_BTD[:, -num_tokens:]
        if "head" in own:
            logits_BKV = head_logits(own["head"], hidden_BKD, config.logit_scale)
        else:
            logits_BKV = target_logits(weights["target"], hidden_BKD) * config.logit_scale
        vocabulary = {"target_ids_V": own.get("target_ids"), "vocab_size": vocab_size}
        if config.markov is None:
            drafts = drafts_at_once(logits_BKV, counts_B, view, sample_method, **vocabulary)
        else:
            drafted, token_B, memory_BX = [], last_B1[:, 0], markov.start(config, last_B1.shape[0])
            for k in range(num_tokens):
                said_BV, memory_BX = markov.step(own["markov"], config, token_B, hidden_BKD[:, k], memory_BX)
                if shards.is_split(logits_BKV):  # the target's head, of which a device has its part
                    said_BV = shards.vocabulary_part(said_BV)
                logits_BV = logits_BKV[:, k] + said_BV * config.logit_scale
                drafted.append(next_draft(logits_BV, view, k, sample_method, **vocabulary))
                token_B = drafted[-1][0]
            drafts = joined(drafted, counts_B)
        return drafts, DflashState(pool=pool, seen=state.seen)

    def commit(state: DflashState, view: RowView, seen_BJX, num_kept_B) -> DflashState:
        return DflashState(pool=state.pool, seen=see_round(state.seen, view, seen_BJX[:, :, hidden_size:], num_kept_B))

    return Proposer(
        num_tokens, init, prefill, propose, commit, config.aux_streams, page_lookahead=0, sees_plain_rounds=True
    )
