"""Host. What acceptance is called, and when another reading is clearly better."""

import math

import numpy as np
import pytest

from jaxspec.config.methods import METHODS, drafter_of
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.tools.diagnosis import compare, explanation, plausible_range, verdict_of


def stats_of(*histogram):
    stats = AcceptanceStats(len(histogram) - 1)
    for num_accepted, count in enumerate(histogram):
        for _ in range(count):
            stats.observe(stats.num_spec_tokens, num_accepted, num_accepted + 1)
    return stats


@pytest.mark.parametrize(
    ("method", "histogram", "verdict"),
    [
        ("eagle3", (19, 0, 0), "unknown"),
        ("eagle3", (20, 0, 0), "useless"),
        ("eagle3", (91, 9, 0), "useless"),
        ("eagle3", (90, 10, 0), "low"),
        ("eagle3", (51, 49, 0), "low"),
        ("eagle3", (50, 25, 25), "plausible"),
        ("eagle3", (0, 50, 50), "plausible"),
        ("eagle3", (0, 1, 99), "suspiciously high"),
        ("draft_model", (0, 0, 100), "suspiciously high"),
        ("ngram", (80, 10, 10), "plausible"),
        ("ngram", (0, 0, 100), "plausible"),
        ("ngram", (100, 0, 0), "useless"),
    ],
)
def test_verdicts(method, histogram, verdict):
    assert verdict_of(method, stats_of(*histogram)) == verdict
    assert explanation(method, verdict)


def test_every_trained_method_has_a_range():
    """What "ngram+model" drafts with is settled before it is judged."""
    for name, method in METHODS.items():
        bounds = plausible_range(name)
        if (method.needs in ("model", "head") and name != "ngram+model") or drafter_of(name) == "mtp":
            assert bounds is not None
            assert 0.1 < bounds[0] < bounds[1] < 1
        else:
            assert bounds is None


def fair_coin(num_better, num_worse):
    """P[at least so many heads], by counting."""
    n = num_better + num_worse
    return sum(math.comb(n, heads) for heads in range(num_better, n + 1)) / 2**n


@pytest.mark.parametrize(("num_better", "num_worse", "num_equal"), [(15, 0, 5), (13, 0, 0), (12, 6, 40), (0, 9, 1)])
def test_the_sign_test(num_better, num_worse, num_equal):
    kept = np.ones(num_better + num_worse + num_equal, int)
    other = kept + np.array([1] * num_better + [-1] * num_worse + [0] * num_equal)
    found = compare(kept, other, [(place,) for place in range(len(kept))])
    assert (found.num_better, found.num_worse) == (num_better, num_worse)
    assert found.p_value == pytest.approx(fair_coin(num_better, num_worse))
    assert found.gain == pytest.approx((num_better - num_worse) / len(kept))
    assert found.is_clear(8) == (num_better >= 13 and num_worse == 0)


def test_a_text_that_repeats_itself_counts_once():
    contexts = [(1, 2, 3), (2, 3, 1), (3, 1, 2)] * 20
    found = compare(np.zeros(60, int), np.ones(60, int), contexts)
    assert (found.num_better, found.num_worse, found.gain) == (3, 0, 1.0)
    assert not found.is_clear(1)


def test_a_small_gain_is_not_named_however_sure_it_is():
    contexts = [(place,) for place in range(1000)]
    other = np.zeros(1000, int)
    other[:90] = 1
    assert not compare(np.zeros(1000, int), other, contexts).is_clear(1)
    other[:110] = 1
    assert compare(np.zeros(1000, int), other, contexts).is_clear(8)
