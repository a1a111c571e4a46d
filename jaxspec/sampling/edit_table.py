"""Host. The `EditTable`: what each row forbids or favours, in columns of stated widths; a request that fits none of it
is refused."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.errors import RequestError
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors import LogitsProcessor

MAX_LOGIT_BIAS = 1024  # entries of logit_bias a row (E)
MAX_BAD_WORDS = 128  # token sequences a row may forbid (Z); a word is up to two of them
MAX_BAD_WORD_TOKENS = 16  # tokens of one such sequence (Y)
MASK_BITS = 32  # ids in one word of a mask: id v is bit v % 32 of word v // 32


def mask_words(vocab_size: int) -> int:
    """U: 32-bit words of a mask over the vocabulary."""
    return -(-vocab_size // MASK_BITS)


@struct.dataclass
class EditTable:
    """One row a request; `edit_row` makes them."""

    bias_ids_BE: jax.Array  # i32, -1 = none
    bias_values_BE: jax.Array  # f32, added to the logit
    allowed_BU: jax.Array  # u32 mask of the ids that may be emitted
    bad_words_BZY: jax.Array  # i32, token sequences, right-aligned: -1 before their first token, -1 alone = none
    has_bias_B: jax.Array  # bool
    has_allowed_B: jax.Array  # bool
    has_bad_words_B: jax.Array  # bool
    processors: tuple[Any, ...]  # each engine-wide processor's own columns


def edit_row(
    params: SamplingParams,
    bad_words_ids: Sequence[Sequence[int]],
    vocab_size: int,
    processors: tuple[LogitsProcessor, ...] = (),
) -> EditTable:
    """One request's row in plain numpy, its columns without their B.

    Args:
        bad_words_ids: params.bad_words as token sequences.

    Raises:
        RequestError: an id outside the vocabulary, or more than the table holds.
    """
    bias = params.logit_bias or {}
    check_ids("logit_bias", bias, vocab_size)
    allowed = params.allowed_token_ids
    check_ids("allowed_token_ids", allowed or (), vocab_size)
    _check_width("logit_bias", len(bias), MAX_LOGIT_BIAS, "entries")
    _check_width("bad_words", len(bad_words_ids), MAX_BAD_WORDS, "token sequences (a word may be two)")
    _check_width("bad_words", max(map(len, bad_words_ids), default=0), MAX_BAD_WORD_TOKENS, "tokens a word")
    if params.extra_args and not processors:
        raise RequestError(
            f"extra_args={params.extra_args!r:.100} go to the engine's logits processors, and it has none; leave them "
            "out or build the engine with logits_processors",
            param="extra_args",
        )
    bias_ids_E, bias_values_E = np.full(MAX_LOGIT_BIAS, -1, np.int32), np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias_ids_E[: len(bias)], bias_values_E[: len(bias)] = list(bias), list(bias.values())
    bad_words_ZY = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
    for index, ids in enumerate(bad_words_ids):
        bad_words_ZY[index, MAX_BAD_WORD_TOKENS - len(ids) :] = ids
    return EditTable(
        bias_ids_BE=bias_ids_E,  # pyright: ignore[reportArgumentType]
        bias_values_BE=bias_values_E,  # pyright: ignore[reportArgumentType]
        allowed_BU=pack_mask(np.arange(vocab_size) if allowed is None else allowed, vocab_size),  # pyright: ignore[reportArgumentType]
        bad_words_BZY=bad_words_ZY,  # pyright: ignore[reportArgumentType]
        has_bias_B=np.bool_(len(bias) > 0),  # pyright: ignore[reportArgumentType]
        has_allowed_B=np.bool_(allowed is not None),  # pyright: ignore[reportArgumentType]
        has_bad_words_B=np.bool_(len(bad_words_ids) > 0),  # pyright: ignore[reportArgumentType]
        processors=tuple(processor.columns(params) for processor in processors),
    )


def neutral_edits(num_rows: int, vocab_size: int, processors: tuple[LogitsProcessor, ...] = ()) -> EditTable:
    """Rows that edit nothing: what unused rows hold."""
    row = edit_row(SamplingParams(), (), vocab_size, processors)
    return jax.tree.map(lambda column: jnp.asarray(np.repeat(np.asarray(column)[None], num_rows, axis=0)), row)


def pack_mask(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """u32[U] with the bits of the ids."""
    bits = np.zeros(mask_words(vocab_size) * MASK_BITS, np.uint8)
    bits[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def check_leaves_a_token(
    params: SamplingParams, bad_words_ids: Sequence[Sequence[int]], stop_ids: Sequence[int], vocab_size: int
) -> None:
    """Raises RequestError where the parameters together forbid every token from the first on."""
    forbidden = {ids[0] for ids in bad_words_ids if len(ids) == 1}
    if params.min_tokens > 0:
        forbidden |= set(stop_ids)
    left = (
        vocab_size > len(forbidden) if params.allowed_token_ids is None else set(params.allowed_token_ids) - forbidden
    )
    if not left:
        raise RequestError(
            "allowed_token_ids, bad_words and min_tokens together leave no token to emit; allow more",
            param="allowed_token_ids",
        )


def check_ids(param: str, token_ids, vocab_size: int) -> None:
    """Raises RequestError for the first id outside the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{param}: token id {token_id} is outside the vocabulary [0, {vocab_size})", param=param)


def _check_width(param: str, width: int, limit: int, unit: str) -> None:
    if width > limit:
        raise RequestError(f"{param} must hold at most {limit} {unit}, got {width}; pass fewer", param=param)
