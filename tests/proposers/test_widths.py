"""Host. Which width pays: against every width tried, row by row, in plain arithmetic."""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.proposers.widths import best_width, narrowest, tokens_by_width

RATES = (0.0, 0.25, 0.5, 1.0)  # exact in binary, so that ties are ties


def tokens_of(rows, width):
    """Expected tokens of a round: each row's own, and a draft for each that survives."""
    total = Fraction(0)
    for rates, count in rows:
        chance = Fraction(1)
        total += 1
        for rate in rates[: min(count, width)]:
            chance *= Fraction(rate)
            total += chance
    return total


def best_of(rows, seconds, widths):
    """The index of the narrowest width with the most tokens a second."""
    most = max(count for _, count in rows)
    useful = [index for index, width in enumerate(widths) if index == 0 or widths[index - 1] < most]
    return max(useful, key=lambda index: (tokens_of(rows, widths[index]) / Fraction(seconds[index]), -index))


def arrays_of(rows):
    survival_BK = np.cumprod(np.array([rates for rates, _ in rows], np.float32), axis=1)
    return survival_BK, np.array([count for _, count in rows], np.int32), np.ones(len(rows), np.bool_)


@pytest.mark.parametrize("widths", [(0, 1, 3), (0, 2, 3), (0, 3)])
def test_the_choice_is_the_best_of_all(widths):
    costs = [(1.0, 1.0, 1.0), (1.0, 1.25, 1.5), (1.0, 1.25, 2.0), (1.0, 2.0, 4.0)]
    rows = [
        ((first, later, later), count) for first, later in itertools.product(RATES, repeat=2) for count in (0, 1, 3)
    ]
    chosen, wanted = [], []
    for one, other in itertools.product(rows, rows[::5]):
        for cost in costs:
            seconds = cost[: len(widths)]
            survival_BK, counts_B, is_active_B = arrays_of([one, other])
            args = (survival_BK, counts_B, is_active_B, np.array(seconds, np.float32), widths)
            chosen.append(int(best_width(np, *args)))
            wanted.append(best_of([one, other], seconds, widths))
    assert chosen == wanted
    assert set(chosen) == set(range(len(widths))), "each width is the best somewhere"


def test_the_device_chooses_as_the_host_does():
    rng = np.random.default_rng(0)
    widths = (0, 2, 8)
    device = jax.jit(lambda *args: best_width(jnp, *args, widths))
    for _ in range(50):
        survival_BK = np.cumprod(rng.random((4, 8), np.float32), axis=1)
        args = (survival_BK, rng.integers(0, 9, 4).astype(np.int32), rng.random(4) < 0.7,
                np.cumsum(rng.random(3, np.float32)) + np.float32(1))  # fmt: skip
        assert int(device(*args)) == int(best_width(np, *args, widths))


def test_rows_that_ended_count_for_nothing():
    survival_BK, counts_B = np.ones((2, 2), np.float32), np.array([0, 2], np.int32)
    tokens_W = tokens_by_width(np, survival_BK, counts_B, np.array([True, False]), (0, 2))
    assert tokens_W.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("counts", "index"), [([0, 0], 0), ([1, 0], 1), ([2, 1], 1), ([3, 0], 2), ([8, 8], 2)])
def test_the_narrowest_that_holds_all_drafts(counts, index):
    assert int(narrowest(np, np.array(counts, np.int32), (0, 2, 8))) == index
    assert int(narrowest(jnp, jnp.asarray(counts, jnp.int32), (0, 2, 8))) == index


def test_drafts_that_no_width_holds_go_into_the_widest():
    assert int(narrowest(np, np.array([5], np.int32), (0, 2))) == 1
    assert int(narrowest(np, np.array([5], np.int32), (0,))) == 0
