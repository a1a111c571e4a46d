"""Device. The plain forward pass over texts that are already known: what the target would have said at each token.

It shares the model's functions with the engine and nothing else: no rounds, no rollback, pages of its own.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.cache.pages import new_pool, pool_shape, slots_of
from jaxspec.engine.build import EngineParts
from jaxspec.models.base import Tokens
from jaxspec.step.rounds import Target
from jaxspec.types import Pool

PROMPT_CHUNK = 64  # prompt tokens a row in one pass
ANSWER_CHUNK = 16  # answer tokens a row in one pass, where any shape will do


class Teacher:
    """Teacher-forced logits of many answers, as many at a time as the engine has rows.

    With `one_by_one` each answer token has a pass of its own, in the shape in which plain decoding would have run it:
    one position, or the J positions of an exact engine. Without, answers run in chunks, many times faster.
    """

    def __init__(self, parts: EngineParts, max_len: int, *, one_by_one: bool):
        """max_len: of the longest prompt and answer together."""
        parts.check_one_device("the teacher-forced pass")
        config, self._weights = parts.config, parts.weights["target"]
        self._rows = parts.programs.shapes.batch_rows[-1]
        self._stride = 1 if one_by_one else ANSWER_CHUNK
        self._width = config.num_speculative_tokens + 1 if one_by_one and config.exact else self._stride
        pages_a_row = -(-max_len // config.block_size)
        shape = pool_shape(parts.target.config, self._rows * pages_a_row, config.block_size)
        self._pool = new_pool(shape, config.page_dtype)
        self._pages_BM = np.arange(self._rows * pages_a_row, dtype=np.int32).reshape(self._rows, pages_a_row)
        self._target = parts.target

    def logits(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[np.ndarray]:
        """For each (prompt, answer) in order: f32[T, V], row t the raw logits of the answer's token t."""
        for start in range(0, len(texts), self._rows):
            yield from self._group(texts[start : start + self._rows])

    def _group(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[np.ndarray]:
        whole = [[*prompt, *answer] for prompt, answer in texts]
        first = [len(prompt) - 1 for prompt, _ in texts]
        for start in range(0, max(first), PROMPT_CHUNK):
            ends = [min(end, start + PROMPT_CHUNK) for end in first]
            fed = self._pack(whole, [start] * len(texts), ends, PROMPT_CHUNK)
            self._pool = _forward(self._target, False, self._weights, self._pool, *fed)
        found: list[list[np.ndarray]] = [[] for _ in texts]
        for start in range(0, max(len(answer) for _, answer in texts), self._stride):
            starts = [at + start for at in first]
            ends = [min(begin + self._stride, len(ids) - 1) for begin, ids in zip(starts, whole, strict=True)]
            fed = self._pack(whole, starts, ends, self._width)
            logits_BTV, self._pool = _forward(self._target, True, self._weights, self._pool, *fed)
            logits_BTV = np.asarray(logits_BTV)
            for row, (begin, end) in enumerate(zip(starts, ends, strict=True)):
                found[row].append(logits_BTV[row, : max(0, end - begin)])
        return [np.concatenate(parts) for parts in found]

    def _pack(self, whole: Sequence[Sequence[int]], starts: Sequence[int], ends: Sequence[int], width: int):
        """Tokens [start, end) of each text in a row of `width`; position -1 pads."""
        ids_BT = np.zeros((self._rows, width), np.int32)
        positions_BT = np.full((self._rows, width), -1, np.int32)
        for row, (ids, start, end) in enumerate(zip(whole, starts, ends, strict=True)):
            num_tokens = max(0, end - start)
            ids_BT[row, :num_tokens] = ids[start:end] if num_tokens else []
            positions_BT[row, :num_tokens] = np.arange(start, start + num_tokens)
        return ids_BT, positions_BT, self._pages_BM


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _forward(target: Target, with_logits: bool, weights: Any, pool: Pool, ids_BT, positions_BT, pages_BM):
    tokens = Tokens(
        token_ids_BT=ids_BT,
        positions_BT=positions_BT,
        slots_BT=slots_of(positions_BT, pages_BM, pool.shape[2]),
        pages_BM=pages_BM,
    )
    hidden_BTD, pool = target.family.forward(weights, target.config, tokens, pool)
    return (target.family.logits(weights, target.config, hidden_BTD), pool) if with_logits else pool
