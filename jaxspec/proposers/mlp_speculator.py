"""Device. The MLP speculator: the target's last state and last token start a small recurrence, a step a draft."""

from typing import Any

import jax.numpy as jnp

from jaxspec.config.heads import MlpSpeculatorConfig
from jaxspec.models.heads import mlp_speculator as head
from jaxspec.proposers.base import Proposer, RowView
from jaxspec.proposers.drawing import SampleMethod, as_drafts, next_draft, room_for
from jaxspec.proposers.last_state import last_state_functions, last_state_of
from jaxspec.proposers.seen import Seen
from jaxspec.types import Drafts


def mlp_speculator(
    config: MlpSpeculatorConfig, *, num_tokens: int, max_model_len: int, sample_method: SampleMethod
) -> Proposer:
    """The speculator as a `Proposer`, of at most as many drafts as it has steps; arguments as `eagle` takes them."""

    def propose(weights: Any, state: Seen, view: RowView) -> tuple[Drafts, Seen]:
        own = weights["draft"]
        hidden_BD, can_draft_B = last_state_of(state, view)
        last_B1 = jnp.take_along_axis(view.history_BC, jnp.maximum(view.len_B - 1, 0)[:, None], axis=1)
        token_B = jnp.where(can_draft_B, last_B1[:, 0], 0)
        x_BX = head.start(config, hidden_BD)
        tokens, drawn = [], []
        for k in range(num_tokens):
            x_BX, logits_BV = head.step(own, config, k, x_BX, token_B)
            token_B, drawn_from_BV = next_draft(logits_BV, view, k, sample_method)
            tokens.append(token_B)
            drawn += [] if drawn_from_BV is None else [drawn_from_BV]
        counts_B = jnp.where(can_draft_B, room_for(view, max_model_len, num_tokens), 0)
        return as_drafts(jnp.stack(tokens, axis=1), counts_B, jnp.stack(drawn, axis=1) if drawn else None), state

    init, prefill, commit = last_state_functions(config.hidden_size)
    return Proposer(num_tokens, init, prefill, propose, commit, page_lookahead=0)
