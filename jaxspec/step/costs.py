"""Host. What a round costs by the drafts it makes: the compiled programs timed before the engine is ready."""

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxspec.sampling.edit_table import edit_row
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.table import table_row
from jaxspec.step import pack
from jaxspec.step.programs import Programs
from jaxspec.step.state import Batch, DecodeState
from jaxspec.step.target import Target
from jaxspec.types import Drafts

logger = logging.getLogger(__name__)

LEAST_REPEATS, MOST_REPEATS = 2, 8  # timed calls of each kind, after one that is not
REPEAT_S = 0.4  # for the calls of one bucket and context, before there are no more repeats than the least
SHORT, LONG = 64, 1024  # tokens of the contexts that are timed, where they fit
_PERIOD = 8  # tokens of a context that repeats itself: every lookup finds something


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """contexts: tokens of the longest row, ascending; drafts: drafts a row, ascending from 0; seconds: for each batch
    bucket f64[contexts, drafts], what a whole round takes, drafting included."""

    contexts: tuple[int, ...]
    drafts: tuple[int, ...]
    seconds: Mapping[int, np.ndarray]

    def of(self, bucket_rows: int, context: int) -> np.ndarray:
        """f32[K + 1]: seconds of a round with 0..K drafts a row; between what was timed as the neighbours say."""
        timed_CK = self.seconds[bucket_rows]
        at_K = [np.interp(context, self.contexts, column) for column in timed_CK.T]
        return np.interp(np.arange(self.drafts[-1] + 1), self.drafts, at_K).astype(np.float32)


def timed_drafts(widths: tuple[int, ...], *, is_free: bool) -> tuple[int, ...]:
    """The numbers of drafts to time: each width; where drafting costs something, the least drafts that need it too.

    >>> timed_drafts((0, 2, 8), is_free=True), timed_drafts((0, 2, 8), is_free=False)
    ((0, 2, 8), (0, 1, 2, 3, 8))
    """
    if is_free:
        return widths
    return tuple(sorted({*widths, *(before + 1 for before in widths[:-1])}))


def measure_rounds(
    programs: Programs, target: Target, weights: Any, state: DecodeState, *, num_pages: int, is_free: bool
) -> RoundCosts:
    """Time rounds of every batch bucket and number of drafts, on rows that nobody asked for.

    Args:
        state: donated, no request in it.
        num_pages: of the pool; rows share pages where there are few, since nothing is read of what they hold.
        is_free: drafts are looked up in the context, or come from the host.
    """
    shapes = programs.shapes
    contexts = sorted({max(1, min(SHORT, shapes.max_model_len // 4)), max(1, min(LONG, shapes.max_model_len // 2))})
    rounds = _Rounds(programs, target, weights, state, num_pages, is_free)
    seconds = {}
    points = shapes.host_drafts
    for bucket in shapes.batch_rows:
        if not shapes.num_host_drafts:
            points = timed_drafts(shapes.widths_of(bucket) or (), is_free=is_free)
        seconds[bucket] = np.array([rounds.time(bucket, context, points) for context in contexts])
        logger.info(
            "a round of %d rows takes %s",
            bucket,
            ", ".join(f"{1e3 * at:.1f} ms with {n} drafts" for n, at in zip(points, seconds[bucket][0], strict=True)),
        )
    return RoundCosts(tuple(contexts), points, seconds)


def settled(quickest: np.ndarray) -> np.ndarray:
    """Times that rise with the number of drafts, from the quickest call of each.

    Whatever else the machine did has only added to them, so that a round is at most as dear as a wider one; what never
    ran (inf: the drafter gave fewer) costs as what did.

    >>> settled(np.array([3.0, 2.0, np.inf, 5.0])).tolist()
    [2.0, 2.0, 5.0, 5.0]
    """
    rising = np.minimum.accumulate(quickest[::-1])[::-1]
    return np.where(np.isinf(rising), np.max(rising[np.isfinite(rising)], initial=1e-6), rising)


class _Rounds:
    """Rows that repeat themselves, and rounds over them."""

    def __init__(
        self, programs: Programs, target: Target, weights: Any, state: DecodeState, num_pages: int, is_free: bool
    ):
        self.state = state
        self._programs, self._target, self._weights = programs, target, weights
        self._num_pages, self._is_free = num_pages, is_free
        self._same = programs.spread.same  # groups run the same rows side by side
        self._overhead = 0.0  # of a call that runs several rounds, at no rounds

    def time(self, bucket: int, context: int, points: tuple[int, ...]) -> np.ndarray:
        """f64[len(points)]: seconds of one round with so many drafts a row, rising."""
        for row in range(bucket):
            self._admit(row, context)
            if not self._is_free:
                self._prefill(row, context)
        quickest = np.full(len(points), np.inf)
        started = time.perf_counter()
        for repeat in range(MOST_REPEATS + 1):
            if repeat > LEAST_REPEATS and time.perf_counter() - started > REPEAT_S:
                break
            for index, num_drafts in enumerate(points):
                if self._is_free and repeat + index:
                    for row in range(bucket):
                        self._admit(row, context)
                elapsed, num_drafted = self._round(bucket, num_drafts)
                if repeat and num_drafted == num_drafts:
                    quickest[index] = min(quickest[index], elapsed)
        if self._programs.shapes.max_rounds > 1:
            overhead = min(self._round(bucket, 0, num_rounds=0)[0] for _ in range(LEAST_REPEATS))
            quickest = np.maximum(quickest - overhead, 1e-6)
        return settled(quickest)

    def _round(self, bucket: int, num_drafts: int, num_rounds: int = 1) -> tuple[float, int]:
        """(seconds until the host has the tokens, the most drafts that a row had; -1 where a row has ended)."""
        programs, batch = self._programs, self._batch(bucket, num_drafts)
        jax.block_until_ready(self.state.len_R)
        started = time.perf_counter()
        if programs.shapes.num_host_drafts:
            drafts = Drafts(
                token_ids_BK=np.zeros((bucket, num_drafts), np.int32),  # pyright: ignore[reportArgumentType]
                counts_B=np.full(bucket, num_drafts, np.int32),  # pyright: ignore[reportArgumentType]
            )
            self.state, output = programs.verify_commit(self._weights, self.state, batch, self._same(drafts))
        else:
            self.state, output = programs.decode_rounds(self._weights, self.state, batch, num_rounds)
        packed_BX = np.asarray(programs.spread.part(output.packed_BX, 0))[0]
        elapsed = time.perf_counter() - started
        return elapsed, int(packed_BX[:, -2].max()) if (packed_BX[:, 0] >= 0).all() else -1

    def _batch(self, bucket: int, num_drafts: int) -> Batch:
        shapes = self._programs.shapes
        survival = seconds = None
        if shapes.num_weighed:  # all drafts are sure and all rounds alike: none is dropped
            survival = np.ones((bucket, shapes.num_weighed), np.float32)
            seconds = np.ones(len(shapes.widths_of(bucket) or ()), np.float32)
        batch = pack.pack_batch(
            range(bucket),
            [self._pages(row) for row in range(bucket)],
            bucket,
            shapes.guard_row,
            shapes.pages_per_row,
            num_drafts,
            survival,
            seconds,
        )
        return self._same(batch)

    def _pages(self, row: int) -> list[int]:
        size = self._programs.shapes.pages_per_row
        return [(row * size + index) % self._num_pages for index in range(size)]

    def _admit(self, row: int, context: int) -> None:
        params, config, shapes = SamplingParams(temperature=0), self._target.config, self._programs.shapes
        admission = pack.pack_admission(
            row=row,
            token_ids=[index % _PERIOD % config.vocab_size for index in range(context)],
            num_prompt_tokens=context,
            max_model_len=shapes.max_model_len,
            min_len=0,
            max_len=shapes.max_model_len,
            max_drafts=None,
            wants_logprobs=False,
            stop_ids=[],
            sampling=table_row(params, np.zeros(2, np.uint32)),
            edits=edit_row(params, (), config.vocab_size, self._target.processors),
        )
        self.state = self._programs.admit(self.state, self._same(admission))

    def _prefill(self, row: int, context: int) -> None:
        """The end of the context alone: the drafter's state then stands where the row does."""
        size = min(self._programs.shapes.chunk_tokens[0], context - 1)
        chunk = pack.pack_chunk(row, context - 1 - size, size, self._pages(row), self._programs.shapes.pages_per_row)
        self.state, _ = self._programs.prefill(self._weights, self.state, self._same(chunk))
