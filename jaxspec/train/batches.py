"""Host. Which conversations a step trains on: a pure function of seed and step, so that a resumed run sees the same."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flax import struct

from jaxspec.errors import ConfigError
from jaxspec.train.data.shards import Corpus


@struct.dataclass
class Batch:
    """Conversations cut and padded to T tokens. Leading axes may be added, one for accumulated gradients."""

    token_ids_BT: Any  # i32, 0 past the end
    len_B: Any  # i32
    num_prompt_B: Any  # i32, no loss is taken on the first so many
    draw_B: Any  # i32 >= 0, for trainers that sample places


@dataclass(frozen=True)
class Split:
    """Records of a corpus, by number."""

    train: np.ndarray
    held_out: np.ndarray


def split(corpus: Corpus, num_held_out: int, max_records: int | None, max_length: int) -> Split:
    """Held-out records, spread evenly, and the others; what leaves nothing to learn within max_length is left out.

    Raises: ConfigError where nothing is left to train on.
    """
    usable = np.flatnonzero((corpus.num_prompts + 2 < max_length) & (np.diff(corpus.starts) > corpus.num_prompts + 1))
    if len(usable) < num_held_out + 1:
        raise ConfigError(
            f"{len(usable)} of {len(corpus)} conversations have an answer within max_length={max_length}, and "
            f"held_out={num_held_out} of them are kept back; make more data, or lower held_out"
        )
    at = np.linspace(0, len(usable) - 1, num_held_out).astype(np.int64)
    train = np.delete(usable, at)
    return Split(train if max_records is None else train[:max_records], usable[at])


def training_batch(corpus: Corpus, records: np.ndarray, step: int, seed: int, shape: tuple[int, int, int]) -> Batch:
    """The batch of an optimiser step: every epoch goes through all records in an order of its own.

    Args:
        step: from 0.
        shape: [accumulated gradients, rows, tokens].
    """
    num_each = shape[0] * shape[1]
    wanted = step * num_each + np.arange(num_each)
    chosen = np.empty(num_each, np.int64)
    for epoch in np.unique(wanted // len(records)):
        order = np.random.default_rng([seed, int(epoch)]).permutation(records)
        here = wanted // len(records) == epoch
        chosen[here] = order[wanted[here] % len(records)]
    draws = np.random.default_rng([seed, step, 1]).integers(2**31 - 1, size=num_each, dtype=np.int32)
    return replace(pack(corpus, chosen, shape), draw_B=draws.reshape(shape[:2]))


def pack(corpus: Corpus, records: np.ndarray, shape: tuple[int, int, int]) -> Batch:
    """Records as a batch; rows past their number are empty."""
    A, B, T = shape
    token_ids = np.zeros((A * B, T), np.int32)
    lengths, num_prompts = np.zeros(A * B, np.int32), np.zeros(A * B, np.int32)
    for row, index in enumerate(records):
        record = corpus[int(index)]
        ids = record.token_ids[:T]
        token_ids[row, : len(ids)] = ids
        lengths[row], num_prompts[row] = len(ids), min(record.num_prompt, T)
    draws = np.zeros((A, B), np.int32)
    return Batch(token_ids.reshape(shape), lengths.reshape(A, B), num_prompts.reshape(A, B), draws)
