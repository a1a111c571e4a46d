"""Device and host. What a drafter's pass is fed: rows side by side on the device; and on the host, for comparison, what
its first pass after a verified round is in vLLM's packed layout, rows end to end.

A row was fed its last committed token and its drafts, some of them rejected; now it has one new token. Models see the
kept tokens and the new one at their own positions. Heads over hidden states (`shift`) see each state with the token
that follows it, so that ids move one to the left and positions stay. Parallel drafters have masks behind the new token.
What was rejected is padding: it keeps its slots, so that shapes do not depend on what was accepted, and writes nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxspec.cache.pages import slots_of
from jaxspec.models.base import Tokens


def tokens_at(
    token_ids_BT: jax.Array, positions_BT: jax.Array, pages_BM: jax.Array, *, block_size: int, max_model_len: int
) -> Tokens:
    """The tokens of a drafter's pass over pages of block_size; what lies beyond its own length is padding, as
    positions below 0 are."""
    inside_BT = (positions_BT >= 0) & (positions_BT < max_model_len)
    positions_BT = jnp.where(inside_BT, positions_BT, -1)
    return Tokens(
        token_ids_BT=jnp.where(inside_BT, token_ids_BT, 0),
        positions_BT=positions_BT,
        slots_BT=slots_of(positions_BT, pages_BM, block_size),
        pages_BM=pages_BM,
    )


def with_masks(
    token_ids_BJ: jax.Array, positions_BJ: jax.Array, counts_B: jax.Array, *, mask_token_id: int, num_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """(token_ids_BT, positions_BT) of a pass that drafts at once: a row's new tokens, and in the last K - 1 columns the
    masks at the positions behind them. The last new token makes the first draft and each mask one more, so that a row
    of fewer drafts has fewer masks, and a row of none has none."""
    k_1k = jnp.arange(1, num_tokens, dtype=jnp.int32)[None, :]
    last_B1 = jnp.max(positions_BJ, axis=1, keepdims=True)
    masks_Bk = jnp.where(k_1k < counts_B[:, None], last_B1 + k_1k, -1)
    mask_ids_Bk = jnp.full(masks_Bk.shape, mask_token_id, jnp.int32)
    return (
        jnp.concatenate([token_ids_BJ, mask_ids_Bk], axis=1),
        jnp.concatenate([positions_BJ, masks_Bk], axis=1),
    )


def drafting_columns(x_BTD: jax.Array, positions_BJ: jax.Array) -> jax.Array:
    """Of what such a pass gave, [B, K, D]: at each row's last new token, and at the masks."""
    num_new_B = jnp.sum((positions_BJ >= 0).astype(jnp.int32), axis=1)
    first_B1D = jnp.take_along_axis(x_BTD, jnp.maximum(num_new_B - 1, 0)[:, None, None], axis=1)
    return jnp.concatenate([first_B1D, x_BTD[:, positions_BJ.shape[1] :]], axis=1)


class FirstPass(NamedTuple):
    """The tokens of a first pass, T of all B rows, end to end; starts_b has B + 1 entries, samples_n what is read."""

    token_ids_T: np.ndarray  # i32
    positions_T: np.ndarray  # i32, 0 where padded
    is_rejected_T: np.ndarray  # bool
    is_mask_T: np.ndarray  # bool
    samples_n: np.ndarray  # i32, of a row the new token and then its masks
    starts_b: np.ndarray  # i32


def first_pass(
    token_ids_T: ArrayLike,
    positions_T: ArrayLike,
    query_lens_B: ArrayLike,
    num_rejected_B: ArrayLike,
    next_token_ids_B: ArrayLike,
    *,
    pad_id: int,
    num_masks: int = 0,
    mask_id: int = -1,
    shift: bool = False,
) -> FirstPass:
    """Lay out what the drafter sees.

    Args:
        token_ids_T, positions_T: what the target was fed; query_lens_B of it in each row.
        num_rejected_B: how many of a row's last ones were rejected.
        next_token_ids_B: the token that followed what was kept.
        num_masks: K - 1 for a parallel drafter.
        shift: pair each position with the token after it; the first token of a row then has no place.
    """
    token_ids_T, positions_T = np.asarray(token_ids_T), np.asarray(positions_T)
    parts: list[tuple[np.ndarray, ...]] = []
    samples: list[int] = []
    start, out = 0, 0
    for length, num_rejected, token_id in zip(
        np.asarray(query_lens_B).tolist(),
        np.asarray(num_rejected_B).tolist(),
        np.asarray(next_token_ids_B),
        strict=True,
    ):
        kept = token_ids_T[start + shift : start + length - num_rejected]
        num_real = len(kept) + 1 + num_masks
        ids = np.concatenate([kept, [token_id], np.full(num_masks, mask_id), np.full(num_rejected, pad_id)])
        positions = np.concatenate([positions_T[start] + np.arange(num_real), np.zeros(num_rejected)])
        place = np.arange(len(ids))
        parts.append((ids, positions, place >= num_real, (place > len(kept)) & (place < num_real)))
        samples += range(out + len(kept), out + num_real)
        start, out = start + length, out + len(ids)
    ids_T, positions_T, is_rejected_T, is_mask_T = (np.concatenate(column) for column in zip(*parts, strict=True))
    return FirstPass(
        ids_T.astype(np.int32),
        positions_T.astype(np.int32),
        is_rejected_T,
        is_mask_T,
        np.array(samples, np.int32),
        np.cumsum([0, *(len(ids) for ids, *_ in parts)]).astype(np.int32),
    )


def next_token_ids(
    sampled_BJ: ArrayLike, is_discarded_B: ArrayLike, backup_token_ids_B: ArrayLike, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """(each row's last token, how many it got); a row without any, or still in its prompt, has its backup and 0."""
    sampled_BJ = np.asarray(sampled_BJ)
    is_valid_BJ = (sampled_BJ >= 0) & (sampled_BJ < vocab_size) & ~np.asarray(is_discarded_B)[:, None]
    count_B = is_valid_BJ.sum(axis=1)
    last_B = sampled_BJ.shape[1] - 1 - np.argmax(is_valid_BJ[:, ::-1], axis=1)
    last_token_B = np.take_along_axis(sampled_BJ, last_B[:, None], axis=1)[:, 0]
    return np.where(count_B > 0, last_token_B, backup_token_ids_B), count_B


def kept_tokens(query_lens_B: ArrayLike, num_rejected_B: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """(starts_b, indices into the packed tokens) of a drafter batch without padding: what was rejected is left out."""
    query_lens_B, num_rejected_B = np.asarray(query_lens_B), np.asarray(num_rejected_B)
    ends_B = np.cumsum(query_lens_B)
    kept = [
        np.arange(end - length, end - rejected)
        for end, length, rejected in zip(ends_B, query_lens_B, num_rejected_B, strict=True)
    ]
    return np.cumsum([0, *map(len, kept)]), np.concatenate(kept)


def padded_samples(
    query_lens_B: ArrayLike, num_drafts_B: ArrayLike, num_sampled_B: ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rejected a row, the index that each row is sampled at, starts_b) of a padded drafter batch: lengths stay."""
    num_drafts_B = np.asarray(num_drafts_B)
    num_rejected_B = np.where(num_drafts_B > 0, num_drafts_B + 1 - np.asarray(num_sampled_B), 0)
    starts_b = np.cumsum([0, *np.asarray(query_lens_B)])
    return num_rejected_B, starts_b[1:] - 1 - num_rejected_B, starts_b
