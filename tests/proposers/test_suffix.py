"""Host. Suffix decoding against trying everything, in a row's own text and in past answers; what is kept and for how
long."""

import numpy as np
import pytest

from jaxspec.proposers.suffix import SuffixProposer
from tests.oracle.suffix import best, suffix_guess

K = 6
DEFAULTS = {"max_model_len": 200, "max_tree_depth": 24, "max_cached_requests": 100, "max_spec_factor": 1.0,
            "min_token_prob": 0.1}  # fmt: skip


def proposer_of(num_tokens=K, **options):
    return SuffixProposer(num_tokens, **(DEFAULTS | options))


def guess_of(proposer, prompt, output=(), name="row"):
    proposer.observe(name, prompt, list(output))
    (guess,) = proposer.propose([name])
    return guess


def repetitive(rng, length, letters=3):
    """Text that repeats itself, with changes."""
    text = rng.integers(0, letters, 8).tolist()
    while len(text) < length:
        start = int(rng.integers(0, len(text)))
        text += [*text[start : start + int(rng.integers(1, 9))], int(rng.integers(0, letters))]
    return text[:length]


OPTIONS = [
    {},
    {"max_tree_depth": 3},
    {"max_spec_factor": 2.5},
    {"max_spec_factor": 0.5},
    {"min_token_prob": 0.6},
    {"min_token_prob": 0.0},
    {"max_tree_depth": 1, "max_spec_factor": 9.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_guesses_are_those_of_trying_everything(options):
    rng = np.random.default_rng(1)
    settings = DEFAULTS | options
    limits = {
        "depth": settings["max_tree_depth"], "factor": settings["max_spec_factor"],
        "min_prob": settings["min_token_prob"],
    }  # fmt: skip
    proposer = proposer_of(**options)
    past, sources = [], set()
    for number in range(25):
        text = repetitive(rng, int(rng.integers(1, 60)))
        num_prompt = int(rng.integers(1, len(text) + 1))
        own, own_score = best(text, K, **limits)
        other, other_score = best(text, K, texts=past, **limits)
        sources.add((bool(own), other_score > own_score))
        expected = other if other_score > own_score else own
        assert guess_of(proposer, text[:num_prompt], text[num_prompt:], str(number)) == expected
        proposer.finish(str(number))
        past.append(text[num_prompt:])
    assert sources >= {(True, False)}
    if limits["factor"] >= 1:
        assert (True, True) in sources  # past answers do have a say


def test_counts_decide_and_the_newest_of_equals():
    assert guess_of(proposer_of(), [1, 2, 1, 2, 1, 3, 1]) == [2]
    assert guess_of(proposer_of(), [1, 2, 1, 3, 1]) == [3]
    assert guess_of(proposer_of(), [5, 6, 7]) == []


def test_a_longer_suffix_is_followed_further():
    text = [*range(10, 20), 0, *range(10, 16)]
    assert guess_of(proposer_of(num_tokens=9), text) == [16, 17, 18, 19, 0, 10]  # six tokens match
    assert guess_of(proposer_of(num_tokens=9, max_spec_factor=0.5), text) == [16, 17, 18]
    assert guess_of(proposer_of(num_tokens=2), text) == [16, 17]


def test_nothing_is_guessed_past_the_models_length():
    text = [1, 2, 3, 4] * 5
    lengths = {limit: len(guess_of(proposer_of(max_model_len=limit), text)) for limit in (20, 21, 22, 24, 40)}
    assert lengths == {20: 0, 21: 0, 22: 1, 24: 3, 40: K}


def test_a_text_may_come_in_pieces():
    text = repetitive(np.random.default_rng(3), 700)
    proposer = proposer_of(max_model_len=10_000)
    for end in (5, 6, 6, 200, 201, 690, 695):
        guess = guess_of(proposer, text[:5], text[5:end])
        assert guess == suffix_guess(text[:end], K)


def test_past_answers_outlive_their_requests_and_prompts_do_not():
    proposer = proposer_of()
    proposer.observe("a", [1, 2, 3, 4, 5], [7, 8, 9])
    proposer.finish("a")
    assert guess_of(proposer, [0, 7, 8], name="b") == [9]
    assert guess_of(proposer, [0, 2, 3], name="c") == []
    assert guess_of(proposer, [0, 5], name="d") == []  # an answer's first token did not follow a prompt's last
    proposer.finish("never observed")


def test_the_oldest_answers_leave_first():
    proposer = proposer_of(max_cached_requests=3)
    answers = [[10 * n, 10 * n + 1, 10 * n + 2] for n in range(1, 40)]
    for number, answer in enumerate(answers, 1):
        proposer.observe("x", [0], answer)
        proposer.finish("x")
        kept = answers[max(0, number - 3) : number]
        for old in answers[:number]:
            expected = [old[2]] if old in kept else []
            assert guess_of(proposer, [9, *old[:2]], name="probe") == expected
            proposer._texts.pop("probe")  # the probe's own text is not to be remembered
    assert len(proposer.past) == 3
    assert len(proposer.past.token_ids) <= 2 * 4 * 3  # what has left is forgotten in time


def test_nothing_is_remembered_where_nothing_may_be():
    proposer = proposer_of(max_cached_requests=0)
    proposer.observe("a", [1], [7, 8, 9])
    proposer.finish("a")
    assert guess_of(proposer, [0, 7, 8], name="b") == []


def test_rows_do_not_mix():
    proposer = proposer_of()
    texts = {name: repetitive(np.random.default_rng(seed), 50) for seed, name in enumerate("abc")}
    for name, text in texts.items():
        proposer.observe(name, text[:10], text[10:])
    together = proposer.propose(["c", "a", "b"])
    assert together == [suffix_guess(texts[name], K) for name in ("c", "a", "b")]
    assert proposer.propose(["b"]) == [together[2]]
