"""Device. From a drafter's logits to drafts: which token, under which key, and as which distribution; step by step."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxspec import shards
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
    token_B = draw(logits_BV, token_key(view.table.key_B2, view.len_B, offset, Purpose.DRAFT), view.table)
    return token_B, shards.vocabulary_part(logits_BV)  # of a split vocabulary, what the target's logits are judged by


def drafts_at_once(
    logits_BKV: jax.Array,
    counts_B: jax.Array,
    view: RowView,
    sample_method: SampleMethod,
    *,
    target_ids_V: jax.Array | None = None,
    vocab_size: int = 0,
) -> Drafts:
    """K drafts a row, each from logits of its own that depend on no other draft; arguments as `next_draft` takes
    them."""
    drafts = [
        next_draft(logits_BKV[:, k], view, k, sample_method, target_ids_V=target_ids_V, vocab_size=vocab_size)
        for k in range(logits_BKV.shape[1])
    ]
    return joined(drafts, counts_B)


def joined(drafts: Sequence[tuple[jax.Array, jax.Array | None]], counts_B: jax.Array) -> Drafts:
    """What `next_draft` gave, one after the other."""
    drawn = [logits_BV for _, logits_BV in drafts if logits_BV is not None]
    token_ids_BK = jnp.stack([token_B for token_B, _ in drafts], axis=1)
    return as_drafts(token_ids_BK, counts_B, jnp.stack(drawn, axis=1) if drawn else None)


def room_for(view: RowView, max_model_len: int, num_tokens: int) -> jax.Array:
    """Drafts a row can use: none where the drafter's own length ends, the last token being the target's."""
    room_B = jnp.minimum(view.max_len_B - 1, max_model_len) - view.len_B
    if view.max_drafts_B is not None:
        room_B = jnp.minimum(room_B, view.max_drafts_B)
    return jnp.clip(room_B, 0, num_tokens)


def as_drafts(token_ids_BK: jax.Array, counts_B: jax.Array, logits_BKV: jax.Array | None = None) -> Drafts:
    """Drafts of these tokens, as many as count."""
    k_1K = jnp.arange(token_ids_BK.shape[1], dtype=jnp.int32)[None, :]
    token_ids_BK = jnp.where(k_1K < counts_B[:, None], token_ids_BK, -1)
    return Drafts(token_ids_BK=token_ids_BK, counts_B=counts_B, logits_BKV=logits_BKV)


def draft_in_steps(
    step: Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array, jax.Array | None]],
    carry: Any,
    token_B: jax.Array,
    counts_B: jax.Array,
    num_tokens: int,
    *,
    first_logits_BV: jax.Array | None = None,
    drawn_vocab_size: int | None = None,
    before: Sequence[tuple[jax.Array, jax.Array | None]] = (),
) -> tuple[Drafts, Any]:
    """Drafts of a chain, each from the one before, in as many steps as the row with the most needs: (drafts, carry).

    Args:
        step: (carry, the token before, offset i32[]) -> (carry, draft, the logits it was drawn from or None).
        token_B: the chain's first draft, or the token before it where drawn_vocab_size is given.
        counts_B: how many drafts each row makes.
        num_tokens: K, the most.
        first_logits_BV: what the first draft was drawn from, if it was drawn.
        drawn_vocab_size: the first draft is a step's too; 0, or the size of logits that drafts are drawn from.
        before: drafts that were made before token_B, as `next_draft` gives them.
    """
    B, K = token_B.shape[0], num_tokens
    drafts = Drafts(token_ids_BK=jnp.zeros((B, K), jnp.int32), counts_B=counts_B)
    size = shards.size_of_part(drawn_vocab_size or 0) if first_logits_BV is None else first_logits_BV.shape[1]
    if size:
        drafts = dataclasses.replace(drafts, logits_BKV=shards.split(jnp.zeros((B, K, size), jnp.float32)))
    start = 0
    if drawn_vocab_size is None:
        for draft in (*before, (token_B, first_logits_BV)):
            drafts, start = _with_draft(drafts, start, *draft), start + 1

    def body(offset, loop):
        carry, token_B, drafts = loop
        carry, token_B, logits_BV = step(carry, token_B, offset)
        return carry, token_B, _with_draft(drafts, offset, token_B, logits_BV)

    if start < K:
        # What a loop carries is updated in place, a pool of pages too.
        carry, _, drafts = jax.lax.fori_loop(jnp.int32(start), jnp.max(counts_B), body, (carry, token_B, drafts))
    return as_drafts(drafts.token_ids_BK, counts_B, drafts.logits_BKV), carry


def _with_draft(drafts: Drafts, offset, token_B: jax.Array, logits_BV: jax.Array | None) -> Drafts:
    token_ids_BK = drafts.token_ids_BK.at[:, offset].set(token_B)
    logits_BKV = None if drafts.logits_BKV is None else drafts.logits_BKV.at[:, offset].set(logits_BV)
    return dataclasses.replace(drafts, token_ids_BK=token_ids_BK, logits_BKV=logits_BKV)
