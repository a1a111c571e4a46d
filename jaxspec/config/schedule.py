"""Host. How many drafts a row gets at each batch size: vLLM's `num_speculative_tokens_per_batch_size`."""

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
