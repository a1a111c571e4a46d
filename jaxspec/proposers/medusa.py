"""Device. Medusa: one state of the target, a head for each place ahead, all of them at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config.heads import MedusaConfig
from jaxspec.models.heads.medusa import blocks, own_logits
from jaxspec.proposers.base import Proposer, RowView
from jaxspec.proposers.drawing import SampleMethod, drafts_at_once, room_for
from jaxspec.proposers.last_state import last_state_functions, last_state_of
from jaxspec.proposers.seen import Seen
from jaxspec.types import Drafts


def medusa(
    config: MedusaConfig,
    *,
    target_logits: Callable[[Any, jax.Array], jax.Array],
    vocab_size: int,
    num_tokens: int,
    max_model_len: int,
    sample_method: SampleMethod,
) -> Proposer:
    """Medusa's heads as a `Proposer`, of at most as many drafts as there are heads; arguments as `eagle` takes them."""

    def propose(weights, state: Seen, view: RowView) -> tuple[Drafts, Seen]:
        own = weights["draft"]
        hidden_BD, can_draft_B = last_state_of(state, view)
        hidden_BKD = blocks(own, config, hidden_BD, num_tokens)
        if config.own_heads == "none":
            logits_BKV = target_logits(weights["target"], hidden_BKD)
        else:
            logits_BKV = own_logits(own, config, hidden_BKD)
        counts_B = jnp.where(can_draft_B, room_for(view, max_model_len, num_tokens), 0)
        vocabulary = {"target_ids_V": own.get("target_ids"), "vocab_size": vocab_size}
        return drafts_at_once(logits_BKV, counts_B, view, sample_method, **vocabulary), state

    init, prefill, commit = last_state_functions(config.hidden_size)
    return Proposer(num_tokens, init, prefill, propose, commit, page_lookahead=0)
