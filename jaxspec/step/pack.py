"""Host. Plain numpy in the shapes the programs were compiled for: padding is -1 or the guard row, never a real row."""

from collections.abc import Sequence

import numpy as np

from jaxspec.errors import RequestError
from jaxspec.sampling.edit_table import EditTable
from jaxspec.step.prefill import Admission, Chunk
from jaxspec.step.state import MAX_STOP_IDS, Batch
from jaxspec.types import SamplingTable

NO_LIMIT = 2**30  # of max_drafts: more than any K


def bucket_of(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size`; buckets ascend."""
    for bucket in buckets:
        if size <= bucket:
            return bucket
    raise AssertionError(f"{size=} exceeds the largest of {buckets=}")


def geometric_buckets(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """smallest, smallest * factor, … below `largest`, then `largest` itself."""
    buckets = []
    while smallest < largest:
        buckets.append(smallest)
        smallest *= factor
    return (*buckets, largest)


def row_buckets(largest: int) -> tuple[int, ...]:
    """1, 4, 8, 16, … below `largest`, then `largest` itself: two rows run as four, for a program less."""
    return (1, *geometric_buckets(4, largest, 2)) if largest > 1 else (1,)


def pack_pages(pages: Sequence[int], pages_per_row: int) -> np.ndarray:
    """i32[M]: the pages in order, then -1."""
    packed = np.full(pages_per_row, -1, np.int32)
    packed[: len(pages)] = pages
    return packed


def pack_batch(
    rows: Sequence[int],
    pages: Sequence[Sequence[int]],
    bucket_rows: int,
    guard_row: int,
    pages_per_row: int,
    max_drafts: int = NO_LIMIT,
    survival: np.ndarray | None = None,
    seconds: np.ndarray | None = None,
) -> Batch:
    """The rows of a round, padded to a bucket with the guard row.

    survival: f32[rows, K], and seconds: f32[W], where the round weighs drafts.
    """
    rows_B = np.full(bucket_rows, guard_row, np.int32)
    rows_B[: len(rows)] = rows
    pages_BM = np.full((bucket_rows, pages_per_row), -1, np.int32)
    for index, row_pages in enumerate(pages):
        pages_BM[index] = pack_pages(row_pages, pages_per_row)
    survival_BK = None
    if survival is not None:
        survival_BK = np.zeros((bucket_rows, survival.shape[1]), np.float32)
        survival_BK[: len(rows)] = survival
    return Batch(
        rows_B=rows_B,  # pyright: ignore[reportArgumentType]
        pages_BM=pages_BM,  # pyright: ignore[reportArgumentType]
        max_drafts=np.int32(max_drafts),  # pyright: ignore[reportArgumentType]
        survival_BK=survival_BK,  # pyright: ignore[reportArgumentType]
        seconds_W=seconds,  # pyright: ignore[reportArgumentType]
    )


def pack_chunk(row: int, start: int, num_tokens: int, pages: Sequence[int], pages_per_row: int) -> Chunk:
    """One chunk of a prompt."""
    return Chunk(
        row=np.int32(row),  # pyright: ignore[reportArgumentType]
        start=np.int32(start),  # pyright: ignore[reportArgumentType]
        num_tokens=np.int32(num_tokens),  # pyright: ignore[reportArgumentType]
        pages_M=pack_pages(pages, pages_per_row),  # pyright: ignore[reportArgumentType]
    )


def pack_admission(
    *,
    row: int,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    max_model_len: int,
    min_len: int,
    max_len: int,
    max_drafts: int | None,
    wants_logprobs: bool,
    stop_ids: Sequence[int],
    sampling: SamplingTable,
    edits: EditTable,
) -> Admission:
    """A request's row: its committed tokens, of which the first num_prompt_tokens are its prompt's.

    sampling: `sampling.table.table_row`; edits: `sampling.edit_table.edit_row`.

    Raises:
        RequestError: more stop ids than the device table holds.
    """
    if len(stop_ids) > MAX_STOP_IDS:
        raise RequestError(
            f"stop_token_ids and EOS together must be at most {MAX_STOP_IDS}, got {len(stop_ids)}; pass fewer",
            param="stop_token_ids",
        )
    history = np.zeros(max_model_len, np.int32)
    history[: len(token_ids)] = token_ids
    stops = np.full(MAX_STOP_IDS, -1, np.int32)
    stops[: len(stop_ids)] = stop_ids
    return Admission(
        row=np.int32(row),  # pyright: ignore[reportArgumentType]
        history_C=history,  # pyright: ignore[reportArgumentType]
        # min_tokens may be any number; beyond max_len all mean the same.
        limits_5=np.array(  # pyright: ignore[reportArgumentType]
            [
                len(token_ids),
                num_prompt_tokens,
                min(min_len, max_len),
                max_len,
                min(NO_LIMIT, NO_LIMIT if max_drafts is None else max_drafts),
            ],
            np.int32,
        ),
        wants_logprobs=np.bool_(wants_logprobs),  # pyright: ignore[reportArgumentType]
        stop_ids_W=stops,  # pyright: ignore[reportArgumentType]
        sampling=sampling,
        edits=edits,
    )
