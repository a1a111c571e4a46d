"""Host. Which conversations a step trains on: a pure function of seed and step, so that a resumed run sees the same."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.errors import ConfigError
from jaxspec.train.data.shards import Corpus
from jaxspec.train.seen import Seen


@struct.dataclass
class Batch:
    """Conversations cut and padded to T tokens, and what the target sees of them. Leading axes may be added, one for
    accumulated gradients."""

    token_ids_BT: Any  # i32, 0 past the end
    best_BT: Any  # i32, the target's likeliest next token
    hidden_BTD: Any  # the target's state after its final norm
    streams_BTX: Any  # its streams that the drafter reads, side by side
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


def training_batch(
    corpus: Corpus,
    seen: Seen,
    records: np.ndarray,
    step: int,
    seed: int,
    shape: tuple[int, int, int],
    is_prompt_taught: bool = False,
) -> Batch:
    """The batch of an optimiser step: every epoch goes through all records in an order of its own.

    Args:
        step: from 0.
        shape: [accumulated gradients, rows, tokens].
        is_prompt_taught: loss is taken on prompts too.
    """
    num_each = shape[0] * shape[1]
    wanted = step * num_each + np.arange(num_each)
    chosen = np.empty(num_each, np.int64)
    for epoch in np.unique(wanted // len(records)):
        order = np.random.default_rng([seed, int(epoch)]).permutation(records)
        here = wanted // len(records) == epoch
        chosen[here] = order[wanted[here] % len(records)]
    draws = np.random.default_rng([seed, step, 1]).integers(2**31 - 1, size=num_each, dtype=np.int32)
    batch = replace(pack(corpus, seen, chosen, shape), draw_B=draws.reshape(shape[:2]))
    return replace(batch, num_prompt_B=np.zeros_like(batch.num_prompt_B)) if is_prompt_taught else batch


def pack(corpus: Corpus, seen: Seen, records: np.ndarray, shape: tuple[int, int, int]) -> Batch:
    """Records as a batch; rows past their number are empty."""
    A, B, T = shape
    rows = np.zeros((A * B, T), seen.parts[0].dtype)
    token_ids = np.zeros((A * B, T), np.int32)
    lengths, num_prompts = np.zeros(A * B, np.int32), np.zeros(A * B, np.int32)
    for row, index in enumerate(records):
        record, start = corpus[int(index)], int(corpus.starts[int(index)])
        ids = record.token_ids[:T]
        token_ids[row, : len(ids)] = ids
        rows[row, : len(ids)] = seen.rows(start, start + len(ids))
        lengths[row], num_prompts[row] = len(ids), min(record.num_prompt, T)
    return Batch(
        token_ids_BT=token_ids.reshape(shape),
        best_BT=rows["best"].reshape(shape),
        hidden_BTD=_floats(rows["hidden"]).reshape(*shape, -1),
        streams_BTX=_floats(rows["streams"]).reshape(*shape, rows["streams"].shape[-1]),
        len_B=lengths.reshape(A, B),
        num_prompt_B=num_prompts.reshape(A, B),
        draw_B=np.zeros((A, B), np.int32),
    )


def _floats(kept: np.ndarray) -> np.ndarray:
    return kept if kept.dtype.kind == "f" else kept.view(jnp.bfloat16)
