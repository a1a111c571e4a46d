"""Host. The tool's own form of a token's distribution, against a third one and against brute perturbation."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxspec import RequestError, SamplingParams
from jaxspec.keys import request_key
from jaxspec.tools.distribution import (
    adjusted_logits,
    check_params,
    coupled_noise,
    gap,
    gap_to_kept,
    kept,
    kept_if_shifted,
    pick,
    probabilities,
)
from tests.oracle.llama import row_of
from tests.rejection.numpy_reference import COUPLED, kept_logits, noise, softmax

FILTERS = (
    {},
    {"top_k": 3},
    {"top_k": 1},
    {"top_p": 0.7},
    {"top_p": 0.05},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 0.6, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.95},
)


def rows(seed, num_rows=40, vocab_size=24):
    """Random logits; every other row has equal ones, some of them at the edges of the filters."""
    logits = np.random.default_rng(seed).normal(size=(num_rows, vocab_size)) * 2
    logits[::2] = np.round(logits[::2])
    return logits


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_probabilities_are_those_of_the_reference(filters):
    params = SamplingParams(seed=1, **filters)
    logits = rows(1)
    expected = [softmax(kept_logits(one, row_of(params))) for one in logits]
    np.testing.assert_allclose(probabilities(logits, params), expected, atol=1e-12)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_shift_of_nothing_changes_nothing(filters):
    params = SamplingParams(**filters)
    x = rows(2) / params.temperature
    found = np.stack([kept_if_shifted(one, params, 0.0) for one in x])
    np.testing.assert_array_equal(found, kept(x, params))


@pytest.mark.parametrize("filters", FILTERS[1:], ids=str)
def test_errors_up_to_the_shift_move_no_token_across(filters):
    params, rng, shift = SamplingParams(**filters), np.random.default_rng(3), 0.15
    num_open = 0
    for x in rows(3, num_rows=12):
        sure, possible = kept_if_shifted(x, params, -shift), kept_if_shifted(x, params, shift)
        disturbed = x + rng.uniform(-shift, shift, (400, x.size))
        after = kept(disturbed, params)
        assert not (sure & ~after.all(axis=0)).any()
        assert not (after.any(axis=0) & ~possible).any()
        num_open += (possible & ~sure).sum()
    assert num_open > 0


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_less_than_the_gap_lets_no_other_token_lead(filters):
    params, rng = SamplingParams(**filters), np.random.default_rng(4)
    for logits in rows(4, num_rows=4, vocab_size=12):
        noise_V = rng.gumbel(size=logits.size)
        gaps = np.array([gap(logits, noise_V, token, params) for token in range(logits.size)])
        assert gaps[pick(logits, noise_V, params)] == 0
        for size in (0.1, 0.5, 2.0):
            for disturbed in logits + rng.uniform(-size, size, (60, logits.size)):
                assert gaps[pick(disturbed, noise_V, params)] <= 2 * size


@pytest.mark.parametrize("filters", [one for one in FILTERS if "top_p" not in one], ids=str)
def test_the_gap_is_enough(filters):
    """Without top-p, which bounds alone are known of: the token up and the others down by half of it, and it leads."""
    params, rng = SamplingParams(**filters), np.random.default_rng(5)
    num_finite = 0
    for logits in rows(5, num_rows=4, vocab_size=12):
        noise_V = rng.gumbel(size=logits.size)
        for token in range(logits.size):
            needed = gap(logits, noise_V, token, params)
            if needed == 0 or not np.isfinite(needed):
                continue
            num_finite += 1
            half = needed / 2 + 1e-6
            pushed = logits - half
            pushed[token] += 2 * half
            assert kept(pushed[None] / params.temperature, params)[0, token]
            # Rivals at a filter's edge are taken to fall.
            is_rival = kept_if_shifted(logits / params.temperature, params, -half / params.temperature)
            is_rival[token] = True
            assert np.where(is_rival, pushed / params.temperature + noise_V, -np.inf).argmax() == token
    assert num_finite > 4


def test_a_greedy_gap_is_the_distance_to_the_largest():
    logits = np.array([1.0, 3.5, -2.0])
    greedy = SamplingParams(temperature=0)
    assert [gap(logits, None, token, greedy) for token in range(3)] == [2.5, 0.0, 5.5]
    assert pick(logits, None, greedy) == 1


def test_the_gap_to_a_filter():
    params = SamplingParams(temperature=2.0, top_k=2)
    logits = np.array([5.0, 4.0, 3.5, -40.0])
    assert gap_to_kept(logits, 1, params) == 0
    np.testing.assert_allclose(gap_to_kept(logits, 2, params), 0.5, atol=1e-6)
    assert gap_to_kept(logits, 3, params) == np.inf


def test_noise_is_the_coupled_rules():
    for seed, position in ((0, 5), (2**40 + 7, 1234)):
        row = row_of(SamplingParams(seed=seed))
        expected = noise(row.draw_key(position, 0, COUPLED), 9)
        np.testing.assert_allclose(coupled_noise(request_key(seed), position, 9), expected, rtol=1e-12)


def plain(**more):
    neutral = {
        "logit_bias": None, "allowed_token_ids": None, "min_tokens": 0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    return SimpleNamespace(**(neutral | more))


def test_adjustments_by_hand():
    raw = np.array([[2.0, -1.0, 0.5, 1.0]] * 3)
    stops = {3}

    def adjusted(bad_words=(), **more):
        return adjusted_logits(raw, plain(**more), [1], [0, 0, 2], stops, bad_words).tolist()

    inf = np.inf
    assert adjusted() == raw.tolist()
    assert adjusted(min_tokens=2) == [[2, -1, 0.5, -inf], [2, -1, 0.5, -inf], [2, -1, 0.5, 1]]
    assert adjusted(logit_bias={2: 3.0}) == [[2, -1, 3.5, 1]] * 3
    assert adjusted(allowed_token_ids=[0, 2]) == [[2, -inf, 0.5, -inf]] * 3
    assert adjusted([[1], [0, 2]]) == [[2, -inf, 0.5, 1], [2, -inf, -inf, 1], [2, -inf, -inf, 1]]
    assert adjusted([[0, 0, 3], [1, 0]]) == [
        [2, -1, 0.5, 1],
        [2, -1, 0.5, 1],
        [2, -1, 0.5, -inf],
    ]  # the prompt is no part
    # Presence and frequency count the answer so far, repetition the prompt as well: doubled or halved by sign.
    assert adjusted(presence_penalty=0.5) == [[2, -1, 0.5, 1], [1.5, -1, 0.5, 1], [1.5, -1, 0.5, 1]]
    assert adjusted(frequency_penalty=0.5) == [[2, -1, 0.5, 1], [1.5, -1, 0.5, 1], [1, -1, 0.5, 1]]
    assert adjusted(repetition_penalty=2.0) == [[2, -2, 0.5, 1], [1, -2, 0.5, 1], [1, -2, 0.5, 1]]


def test_what_cannot_be_judged_is_refused_by_name():
    check_params(SamplingParams())
    params = SamplingParams(logits_processors=(lambda *words: None,))
    with pytest.raises(RequestError, match="cannot judge logits_processors") as caught:
        check_params(params)
    assert caught.value.param == "logits_processors"
