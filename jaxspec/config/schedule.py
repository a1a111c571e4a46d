"""Host. How many drafts a row gets at each batch size, vLLM's `num_speculative_tokens_per_batch_size`; and for which
numbers of drafts rounds are compiled."""

from collections.abc import Sequence
from typing import Any

from jaxspec.errors import ConfigError

KEY = "num_speculative_tokens_per_batch_size"


def dense_schedule(schedule: Any, *, max_batch: int, max_tokens: int) -> tuple[int, ...]:
    """Drafts a row by the number of requests in a step, 0..max_batch; 0 requests have 0.

    Args:
        schedule: [start, end, drafts] ranges of batch sizes, both ends included, in ascending order from 1. A gap and
            what follows the last range keep the drafts of the range before.
        max_tokens: no entry exceeds this.

    Raises: ConfigError for a schedule that is none.

    >>> dense_schedule([[1, 2, 3], [4, 4, 1]], max_batch=5, max_tokens=2)
    (0, 2, 2, 2, 1, 1)
    """
    _check(schedule)
    table, drafts = [0], 0
    ranges = list(schedule)
    for batch in range(1, max_batch + 1):
        if ranges and ranges[0][0] <= batch:
            drafts = ranges.pop(0)[2]
        table.append(min(drafts, max_tokens))
    return tuple(table)


def drafts_at(table: tuple[int, ...], num_requests: int, *, max_tokens: int) -> int:
    """Drafts a row in a step of this many requests; a step of none counts as if there were no schedule."""
    return table[num_requests] if num_requests > 0 else max_tokens


MOST_WIDTHS = 4


def draft_widths(
    batch_rows: Sequence[int], max_tokens: int, table: tuple[int, ...] | None, *, is_adaptive: bool
) -> tuple[tuple[int, ...], ...]:
    """For each batch bucket the numbers of drafts a row that its rounds are compiled to verify, at most MOST_WIDTHS.

    A width more is a forward pass more to compile, so there are few: none and all; a few between where the number
    changes from round to round (`is_adaptive`); or those that the schedule's table names for the bucket's batch sizes.

    >>> draft_widths([1, 4], 8, None, is_adaptive=True), draft_widths([1, 4], 8, (0, 8, 2, 2, 0), is_adaptive=False)
    (((0, 2, 8), (0, 2, 8)), ((0, 8), (0, 2)))
    """
    if table is None:
        few = (-(-max_tokens // 4),) if is_adaptive and max_tokens > 1 else ()
        return ((0, *few, max_tokens),) * len(batch_rows)
    widths, before = [], 0
    for rows in batch_rows:
        named = sorted({drafts for drafts in table[before + 1 : rows + 1] if drafts > 0})
        while len(named) >= MOST_WIDTHS:
            named.pop(len(named) // 2)  # its drafts go into the next wider round
        widths.append((0, *named))
        before = rows
    return tuple(widths)


def _check(schedule: Any) -> None:
    if schedule is None:
        raise ConfigError(f"{KEY} is required for a dynamic number of drafts; give [[1, 16, 4], [17, 64, 2]], say")
    if not isinstance(schedule, list | tuple) or not schedule:
        raise ConfigError(f"{KEY} must be a non-empty list of [start, end, drafts] ranges, got {schedule!r}")
    last_end = 0
    for index, entry in enumerate(schedule):
        if not isinstance(entry, list | tuple) or len(entry) != 3 or any(type(value) is not int for value in entry):
            raise ConfigError(f"{KEY} entries must be three integers [start, end, drafts], got {entry!r}")
        start, end, drafts = entry
        if index == 0 and start != 1:
            raise ConfigError(f"{KEY} must start at 1 (bounds are positive batch sizes), got {entry!r}; begin with 1")
        if start < 1 or end < start:
            raise ConfigError(f"{KEY} bounds must be positive, with start <= end, got {entry!r}; correct the range")
        if start <= last_end:
            raise ConfigError(
                f"{KEY} ranges must be non-overlapping and sorted, got {entry!r} after one that ends at {last_end}; "
                "reorder or cut them"
            )
        if drafts < 0:
            raise ConfigError(f"{KEY} values must be >= 0, got {entry!r}; 0 drafts nothing")
        last_end = end
