"""Host. Fading counts of kept drafts, worked out by hand."""

import numpy as np
import pytest

from jaxspec.metrics.decayed import FIRST_RATE, PRIOR_ROUNDS, DecayedAcceptance, survival


def test_an_engine_that_saw_nothing_expects_its_first_rate_everywhere():
    assert DecayedAcceptance(3, 0.9).rates() == pytest.approx([FIRST_RATE] * 3)


def test_counts_fade_and_a_position_says_what_the_next_unseen_one_is():
    counts = DecayedAcceptance(3, 0.5)
    counts.observe(3, 0)  # the first was tried and refused
    counts.observe(2, 2)  # both drafts kept; a third was not there to try
    assert counts.tried_K == pytest.approx([1.5, 1.0, 0.0])
    assert counts.kept_K == pytest.approx([1.0, 1.0, 0.0])
    first = (1.0 + PRIOR_ROUNDS * FIRST_RATE) / (1.5 + PRIOR_ROUNDS)
    second = (1.0 + PRIOR_ROUNDS * first) / (1.0 + PRIOR_ROUNDS)
    assert counts.rates() == pytest.approx([first, second, second])


def test_survival_is_the_product_of_rates_and_leans_on_the_prior_where_a_row_is_new():
    old, new = DecayedAcceptance(2, 1.0), DecayedAcceptance(2, 1.0)
    for accepted in (0, 0, 1, 2):
        old.observe(2, accepted)
    prior_K = np.array([0.5, 0.25], np.float32)
    first, second = (2 + PRIOR_ROUNDS * 0.5) / (4 + PRIOR_ROUNDS), (1 + PRIOR_ROUNDS * 0.25) / (2 + PRIOR_ROUNDS)
    survival_BK = survival([old, new], prior_K)
    assert survival_BK.dtype == np.float32
    np.testing.assert_allclose(survival_BK, [[first, first * second], [0.5, 0.125]], rtol=1e-6)
