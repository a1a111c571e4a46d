"""Host. Drafts a row by batch size: ranges become a table, and what is no schedule is refused."""

import pytest

from jaxspec.config.schedule import dense_schedule
from jaxspec.errors import ConfigError


def plainly(schedule, max_batch, max_tokens):
    """The last range that has begun decides, batch size by batch size."""
    return tuple(
        min([0, *(drafts for start, _, drafts in schedule if start <= batch)][-1], max_tokens)
        for batch in range(max_batch + 1)
    )


@pytest.mark.parametrize(
    "schedule",
    [
        [[1, 4, 3], [5, 8, 1]],
        [(1, 1, 5), (2, 2, 4), (3, 9, 0), (10, 300, 7)],
        [[1, 16, 3], [32, 128, 2], [256, 2048, 0]],
    ],
)
@pytest.mark.parametrize(("max_batch", "max_tokens"), [(12, 3), (256, 8), (1, 1), (0, 3)])
def test_the_table(schedule, max_batch, max_tokens):
    assert dense_schedule(schedule, max_batch=max_batch, max_tokens=max_tokens) == plainly(
        schedule, max_batch, max_tokens
    )


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (None, "is required"),
        ([], "non-empty list"),
        ({"1": 3}, "non-empty list"),
        ([[2, 16, 3]], "must start at 1"),
        ([[0, 16, 3]], "must start at 1"),
        ([[1, 16, 3], [16, 32, 2]], "non-overlapping and sorted"),
        ([[1, 2, 3], [9, 12, 2], [4, 5, 2]], "non-overlapping and sorted"),
        ([[1, 16, -1]], "values must be >= 0"),
        ([[1, 0, 2]], "must be positive"),
        ([[1, 4, 2], [-3, 9, 1]], "must be positive"),
        ([[1, 4]], "three integers"),
        ([[1, 4, 2.0]], "three integers"),
        ([[1, 4, True]], "three integers"),
        ([5], "three integers"),
    ],
)
def test_what_is_no_schedule_is_refused(schedule, says):
    with pytest.raises(ConfigError) as caught:
        dense_schedule(schedule, max_batch=64, max_tokens=4)
    assert says in str(caught.value)
    assert "num_speculative_tokens_per_batch_size" in str(caught.value)
