"""Host. What every proposer that lives on the host owes: well-formed guesses, from each request's own tokens."""

import copy

import numpy as np
import pytest

from jaxspec.proposers.suffix import SuffixProposer
from tests.lossless.replay import HostReplay, Script

V, K, MAX_LEN = 12, 5, 48


def replay():
    proposer = HostReplay(K)
    proposer.scripts = [Script(text) for text in TEXTS.values()]
    return proposer


def suffix():
    return SuffixProposer(
        K, max_model_len=MAX_LEN, max_tree_depth=8, max_cached_requests=4, max_spec_factor=2.0, min_token_prob=0.1
    )


MEMBERS = {"replay": replay, "suffix": suffix}
TEXTS = {
    name: np.random.default_rng(seed).choice(V, 6).tolist() * (MAX_LEN // 6) for seed, name in enumerate("abc")
}  # fmt: skip
LENGTHS = {"a": 20, "b": 9, "c": 31}
PROMPT = 4


@pytest.fixture(params=MEMBERS)
def proposer(request):
    return MEMBERS[request.param]()


def observe(proposer, name, length):
    proposer.observe(name, TEXTS[name][:PROMPT], TEXTS[name][PROMPT:length])


def test_guesses_are_few_enough_and_tokens(proposer):
    for name, length in LENGTHS.items():
        observe(proposer, name, length)
    guesses = proposer.propose(list(LENGTHS))
    assert len(guesses) == 3
    for guess in guesses:  # these texts repeat, so that everyone has something to say
        assert type(guess) is list
        assert 1 <= len(guess) <= K
        assert all(type(token) is int and 0 <= token < V for token in guess)


def test_nothing_is_guessed_past_the_models_length(proposer):
    for length in range(MAX_LEN - K - 2, MAX_LEN + 1):
        observe(proposer, "a", length)
        (guess,) = proposer.propose(["a"])
        assert len(guess) <= MAX_LEN - length


def test_a_request_depends_on_no_other_that_runs(proposer):
    alone = {}
    for name, length in LENGTHS.items():
        other = copy.deepcopy(proposer)
        observe(other, name, length)
        (alone[name],) = other.propose([name])
    for name, length in LENGTHS.items():
        observe(proposer, name, length)
    for order in (["a", "b", "c"], ["c", "a", "b"], ["b"]):
        assert proposer.propose(order) == [alone[name] for name in order]


def test_asking_changes_nothing_and_tokens_may_come_in_any_pieces(proposer):
    whole = copy.deepcopy(proposer)
    observe(whole, "a", LENGTHS["a"])
    for length in (PROMPT, PROMPT + 1, PROMPT + 1, 11, LENGTHS["a"]):
        observe(proposer, "a", length)
        assert proposer.propose(["a"]) == proposer.propose(["a"])
    assert proposer.propose(["a"]) == whole.propose(["a"])


def test_a_finished_request_is_gone_and_its_id_can_come_again(proposer):
    proposer.finish("never observed")
    observe(proposer, "a", 20)
    proposer.finish("a")
    proposer.observe("a", TEXTS["b"][:PROMPT], TEXTS["b"][PROMPT:9])
    observe(proposer, "b", 9)
    assert proposer.propose(["a"]) == proposer.propose(["b"])
