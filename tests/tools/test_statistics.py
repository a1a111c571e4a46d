"""Host. The statistics of `verify`: known answers, right samplers pass, wrong ones do not."""

import numpy as np
import pytest

from jaxspec.tools import statistics
from jaxspec.tools.statistics import DistributionTest, g_test, transform


def test_g_by_hand():
    """2 * (30 ln 1.5 + 10 ln 0.5) = 10.465; the chi-square law with one degree of freedom is at 0.05 beyond 3.841."""
    statistic, freedom, p = g_test(np.array([30.0, 10.0]), np.array([20.0, 20.0]))
    assert (round(statistic, 3), freedom) == (10.465, 1)
    assert 0.0012 < p < 0.00122
    assert g_test(np.array([20.0, 20.0]), np.array([20.0, 20.0])) == (0.0, 1, 1.0)


def test_small_cells_are_joined():
    _, freedom, _ = g_test(np.array([10.0, 3, 0, 4, 0]), np.array([8.0, 3, 3, 2, 1]))
    assert freedom == 1
    statistic, freedom, p = g_test(np.array([3.0, 0]), np.array([2.0, 1]))
    assert (round(statistic, 9), freedom, p) == (0, 0, 1.0)


def test_a_transform_is_where_a_token_lies_among_the_others():
    prob = np.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
    tokens = np.array([1, 0])
    np.testing.assert_allclose(transform(prob, prob, tokens, np.array([0.5, 0.5])), [0.75, 0.25])
    ids = np.array([[0, 1, 2]] * 2)
    np.testing.assert_allclose(transform(prob, ids, tokens, np.array([0.0, 1.0])), [0.25, 1.0])


V = 50


def distributions(rng, num_tokens, sharpness):
    weight = np.exp(rng.normal(size=(num_tokens, V)) * sharpness)
    return weight / weight.sum(axis=1, keepdims=True)


def run(seed, num_tokens=600, draw=None, with_draft=True):
    """Tests over tokens drawn each from its own distribution; draw(rng, p, q) -> token, rightly if not given."""
    rng = np.random.default_rng(seed)
    test = DistributionTest(seed)
    p, q = distributions(rng, num_tokens, 2.0), distributions(rng, num_tokens, 2.0)
    for i in range(num_tokens):
        token = draw(rng, p[i], q[i]) if draw is not None else rng.choice(V, p=p[i])
        test.add(("first", "second")[i % 2], p[i], int(token), q[i] if with_draft else None, (i // 8, i % 8))
    return test.results()


def test_right_samplers_pass_and_fail_as_rarely_as_they_should():
    p_values = {}
    for seed in range(80):
        tests, improbable = run(seed, num_tokens=300)
        assert improbable == []
        assert not any(test["failed"] for test in tests)
        for test in tests:
            p_values.setdefault(test["test"], []).append(test["p"])
    for name, values in p_values.items():
        # At 0.2 a fifth of them; counts of ranks may be too lenient, since a token's distribution is its own.
        share = np.mean(np.array(values) < 0.2)
        assert share < 0.2 + 3 * np.sqrt(0.16 / len(values)), name
        assert name == "by_rank" or share > 0.08, name


def swaps(rng, p, q):
    """One time in eight the drafter's favourite."""
    return q.argmax() if rng.random() < 0.125 else rng.choice(V, p=p)


def flattens(rng, p, q):
    del q
    return rng.choice(V, p=p**0.8 / (p**0.8).sum())


def walks_up(rng, p, q):
    """An inverse transform whose uniform is rarely small."""
    del q
    return int(np.searchsorted(np.cumsum(p), rng.random() ** 0.8).clip(0, V - 1))


@pytest.mark.parametrize(
    ("draw", "noticed_by"),
    [(swaps, "by_draft"), (flattens, "by_probability"), (flattens, "by_rank"), (walks_up, "by_token")],
)
def test_wrong_samplers_fail(draw, noticed_by):
    tests, _ = run(1, num_tokens=4000, draw=draw)
    assert any(test["failed"] for test in tests if test["test"] == noticed_by)


def test_repeated_random_numbers_show_between_neighbours():
    """Every second token is drawn with the uniform of the one before it; each by itself is right."""
    rng = np.random.default_rng(5)
    test = DistributionTest(5)
    for i, p in enumerate(distributions(rng, 2000, 2.0)):
        u = rng.random() if i % 2 == 0 else u
        order = np.argsort(-p)
        token = order[np.searchsorted(np.cumsum(p[order]), u).clip(0, V - 1)]
        test.add("first", p, int(token), None, (i // 8, i % 8))
    failed = [one["group"] for one in test.results()[0] if one["failed"]]
    assert failed == ["neighbours"]


def test_a_token_that_hardly_ever_comes_is_named():
    test = DistributionTest(0)
    rng = np.random.default_rng(0)
    p = np.array([0.6, 0.4 - 1e-8, 1e-8])
    for i in range(200):
        test.add("first", p, int(rng.choice(3, p=p)) if i != 77 else 2, None, (i // 10, i % 10))
    assert test.results()[1] == [(7, 7)]


def test_groups_with_few_tokens_are_not_tested():
    tests, _ = run(0, num_tokens=60, with_draft=False)
    assert {test["tested"] for test in tests if test["group"] != "neighbours"} == {False}
    assert statistics.LEAST_TOKENS > 30


def test_counting_in_pieces_is_counting():
    whole, _ = run(3)
    before = statistics.CHUNK_CELLS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "CHUNK_CELLS", V * 40)
        pieces, _ = run(3)
    assert before == statistics.CHUNK_CELLS
    # The ranks need no random numbers.
    ranks = [[test["observed"] for test in tests if test["test"] == "by_rank"] for tests in (whole, pieces)]
    assert ranks[0] == ranks[1]
    assert [test["tokens"] for test in whole] == [test["tokens"] for test in pieces]
