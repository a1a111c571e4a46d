"""Device. The target drafts for itself: its first layers guess, untrained, and all of them verify.

The guessing layers are the target's own, and so are their keys: those of committed tokens lie in the target's pages
already, and the drafts' are written where the target will write its own. Source: early exit as in Elhoushi et al. 2024
(LayerSkip), without its training.
"""

import jax
import jax.numpy as jnp

from jaxspec.config.model import ModelConfig
from jaxspec.models.base import Family
from jaxspec.proposers.base import Proposer, RowView
from jaxspec.proposers.drawing import SampleMethod, draft_in_steps, next_draft, room_for
from jaxspec.proposers.inputs import tokens_at
from jaxspec.types import Drafts


def self_draft(
    family: Family,
    config: ModelConfig,
    *,
    exit_layer: int,
    num_tokens: int,
    max_model_len: int,
    sample_method: SampleMethod,
    block_size: int,
) -> Proposer:
    """The target's first `exit_layer` layers, its final norm and its head, as a `Proposer` without a state of its own.

    Args:
        family, config: the target.
        exit_layer: layers that draft, at least 1.
        num_tokens: K.
        max_model_len: positions drafting may use; a row that reaches it goes on without drafts.
        sample_method: as in `draft_model`.
        block_size: slots of a page of the target's pool.
    """

    def propose(weights, pool, view: RowView) -> tuple[Drafts, jax.Array]:
        first_layers = {**weights["target"], "layers": weights["target"]["layers"][:exit_layer]}
        counts_B = jnp.where(view.is_active_B, room_for(view, max_model_len, num_tokens), 0)

        def step(pool, token_B, offset):
            # The token before draft `offset`; the round's first is the last committed one, whose keys nobody has yet.
            position_B = jnp.where(offset < counts_B, view.len_B + offset - 1, -1)
            tokens = tokens_at(
                token_B[:, None],
                position_B[:, None],
                view.pages_BM,
                block_size=block_size,
                max_model_len=max_model_len,
            )
            hidden_B1D, pool = family.forward(first_layers, config, tokens, pool)
            logits_BV = family.logits(first_layers, config, hidden_B1D)[:, 0]
            return pool, *next_draft(logits_BV, view, offset, sample_method)

        last_B1 = jnp.take_along_axis(view.history_BC, jnp.maximum(view.len_B - 1, 0)[:, None], axis=1)
        drawn_vocab_size = 0 if sample_method == "greedy" else config.vocab_size
        return draft_in_steps(step, pool, last_B1[:, 0], counts_B, num_tokens, drawn_vocab_size=drawn_vocab_size)

    return Proposer(
        num_tokens,
        lambda num_rows: (),
        lambda weights, state, rows_B, tokens, seen_BTX: state,
        propose,
        is_in_target_pool=True,
        page_lookahead=0,
    )
