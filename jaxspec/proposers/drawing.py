"""Device. From a drafter's logits to drafts: which token, under which key, and as which distribution."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxspec.keys import Purpose, token_key
from jaxspec.pallas_kernels.rejection.argmax import row_argmax
from jaxspec.proposers.base import RowView
from jaxspec.sampling.logits import draw, process
from jaxspec.types import Drafts

SampleMethod = Literal["greedy", "probabilistic"]


def next_draft(
    logits_BV: jax.Array,
    view: RowView,
    offset: jax.Array | int,
    sample_method: SampleMethod,
    *,
    target_ids_V: jax.Array | None = None,
    vocab_size: int = 0,
) -> tuple[jax.Array, jax.Array | None]:
    """A draft a row, as the target's id, and the target's-vocabulary logits it was drawn from, if it was drawn.

    Args:
        logits_BV: of the drafter.
        view: the rows, whose sampling parameters a drawn draft follows.
        offset: how many drafts of the round come before it.
        sample_method: "greedy" is the arg-max, a point mass.
        target_ids_V: the target's id of each of the drafter's, where its vocabulary is a smaller one.
        vocab_size: the target's, needed with target_ids_V.
    """
    if sample_method == "greedy":
        token_B = row_argmax(logits_BV)
        return (token_B if target_ids_V is None else target_ids_V[token_B]), None
    if target_ids_V is not None:
        everything = jnp.full((logits_BV.shape[0], vocab_size), -jnp.inf, jnp.float32)
        logits_BV = everything.at[:, target_ids_V].set(logits_BV)
    logits_BV = process(logits_BV[:, None], view.table)[:, 0]
    return draw(logits_BV, token_key(view.table.key_B2, view.len_B, offset, Purpose.DRAFT), view.table), logits_BV


def room_for(view: RowView, max_model_len: int, num_tokens: int) -> jax.Array:
    """Drafts a row can use: none where the drafter's own length ends, the last token being the target's."""
    return jnp.clip(jnp.minimum(view.max_len_B - 1, max_model_len) - view.len_B, 0, num_tokens)


def as_drafts(token_ids_BK: jax.Array, counts_B: jax.Array, logits_BKV: jax.Array | None = None) -> Drafts:
    """Drafts of these tokens, as many as count."""
    k_1K = jnp.arange(token_ids_BK.shape[1], dtype=jnp.int32)[None, :]
    token_ids_BK = jnp.where(k_1K < counts_B[:, None], token_ids_BK, -1)
    return Drafts(token_ids_BK=token_ids_BK, counts_B=counts_B, logits_BKV=logits_BKV)
