"""Host. T1: sampled tokens have the target's distribution, greedy ones are the target's; the check notices faults."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from tests.lossless import faults, markov
from tests.lossless.judge import jaxspec_judge
from tests.lossless.markov import DRAFTERS, FIRST, LIMIT, K, Round, V
from tests.quick import heavy_but, heavy_but_first
from tests.rejection.numpy_reference import Row, kept_logits, penalised, softmax

FILTERS = {
    "none": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 0.7, "top_k": 3, "top_p": 0.8, "min_p": 0.1},
}


HALF_CHAINS = 100_000  # where many cases differ little; a right sampler then stays below 0.01
PENALTIES = {"presence": 0.6, "frequency": 0.4, "repetition": 1.3}
PENALISED_PROMPT = (2, 2, 5, 2, 7, 5, 2, 2, 5, 7, 7, FIRST)


def filtered(table_VV, filters):
    """The target's table under the same filters, by sorting in float64."""
    with np.errstate(divide="ignore"):
        return np.stack(
            [softmax(kept_logits(row, Row((0, 0), **{"temperature": 1.0} | filters))) for row in np.log(table_VV)]
        )


RULES = ["standard", "block", "coupled"]
CASES = [(name, filters) for filters in ("none", "all") for name in DRAFTERS]
CASES += [(name, filters) for filters in ("temperature", "top_k", "top_p", "min_p") for name in ("sampled", "argmax")]
QUICK = {("sampled", "all")}


@pytest.mark.parametrize("case", heavy_but(CASES, QUICK.__contains__), ids="-".join)
@pytest.mark.parametrize("rule", RULES)
def test_sampled_tokens_have_the_targets_distribution(rule, case):
    name, filters = case
    drafter = DRAFTERS[name]
    num_chains = markov.NUM_CHAINS if filters == "none" else HALF_CHAINS
    tokens = markov.run_chains(drafter, jaxspec_judge(rule, **FILTERS[filters]), num_chains=num_chains)
    found = markov.distances(tokens, filtered(drafter.target_VV, FILTERS[filters]))
    assert max(found.values()) < LIMIT, found


def penalised_joint(table_VV, filters, length):
    """The distribution of the first `length` tokens after PENALISED_PROMPT, [V] * length, by walking every path."""
    row = Row((0, 0), **{"temperature": 1.0} | filters, **PENALTIES, prompt=PENALISED_PROMPT)
    with np.errstate(divide="ignore"):
        logits_VV = np.log(table_VV)

    @functools.cache
    def follows(last, output):
        return softmax(kept_logits(penalised(logits_VV[last], replace(row, output=output), []), row))

    def tail(last, output, left):
        """[V] * left: what comes after this output."""
        prob = follows(last, tuple(sorted(output)))
        if left == 1:
            return prob
        after = [
            tail(token, (*output, token), left - 1) if prob[token] else np.zeros((V,) * (left - 1))
            for token in range(V)
        ]
        return prob.reshape(V, *[1] * (left - 1)) * np.stack(after)

    return tail(FIRST, (), length)


PENALTY_CASES = [("standard", "none", name) for name in DRAFTERS] + [("block", "none", name) for name in DRAFTERS]
PENALTY_CASES += [("coupled", "none", "sampled"), ("coupled", "all", "ngram")]
QUICK_PENALTY = ("standard", "all", "sampled")
PENALTY_CASES += [(rule, "all", name) for rule in ("standard", "block") for name in ("sampled", "argmax")]


@pytest.mark.parametrize("case", heavy_but(PENALTY_CASES, lambda case: case == QUICK_PENALTY), ids="-".join)
def test_penalised_tokens_have_the_targets_distribution(case):
    """The chain depends on all it has said, so the exact distribution is that of whole paths."""
    rule, filters, name = case
    drafter = DRAFTERS[name]
    judge = jaxspec_judge(rule, **FILTERS[filters], penalties=PENALTIES)
    tokens = markov.run_chains(drafter, judge, num_chains=HALF_CHAINS, prompt=PENALISED_PROMPT)
    joint = penalised_joint(drafter.target_VV, FILTERS[filters], K + 1)
    for first in range(K):
        expected = joint.sum(axis=tuple(axis for axis in range(K + 1) if axis not in (first, first + 1)))
        found = np.zeros((V, V))
        np.add.at(found, (tokens[:, first], tokens[:, first + 1]), 1 / len(tokens))
        assert 0.5 * np.abs(found - expected).sum() < LIMIT, first


def test_the_check_fails_penalties_that_miss_the_drafts_before():
    """A right sampler of a round's tokens, all penalised as the first of them."""
    drafter = DRAFTERS["equal"]
    joint = penalised_joint(drafter.target_VV, {}, 2)
    tokens = markov.run_chains(drafter, faults.sampler(stale_penalties, None), prompt=PENALISED_PROMPT, num_new=2)
    found = np.zeros((V, V))
    np.add.at(found, (tokens[:, 0], tokens[:, 1]), 1 / len(tokens))
    assert 0.5 * np.abs(found - joint).sum() > 2 * LIMIT


def stale_penalties(logits_BJV):
    """Probabilities penalised by the prompt alone, at every position of the round."""
    seen_V = np.isin(np.arange(V), PENALISED_PROMPT)
    repeated = np.where(logits_BJV > 0, logits_BJV / PENALTIES["repetition"], logits_BJV * PENALTIES["repetition"])
    return probabilities(np.where(seen_V, repeated, logits_BJV))


REFUSED = markov.Drafter(markov.HALF, markov.OTHER)  # drafts that the target's grammar often forbids


@pytest.mark.parametrize("rule", heavy_but(["standard", "block"], lambda rule: rule == "standard"))
def test_refused_drafts_count_as_rejected(rule):
    found = markov.distances(markov.run_chains(REFUSED, jaxspec_judge(rule)), REFUSED.target_VV)
    assert max(found.values()) < LIMIT, found


@pytest.mark.parametrize("rule", heavy_but(["standard", "block"], lambda rule: rule == "standard"))
def test_the_check_fails_drafts_that_are_cut_by_their_own_value(rule):
    """A refused draft and those behind it dropped before verification, so that a bonus is drawn in its place."""
    judge = jaxspec_judge(rule)

    def cut(round: Round) -> np.ndarray:
        is_refused_BK = (round.ids_BK % 2 == 1) & (np.arange(K)[None] < round.counts_B[:, None])
        first_B = np.where(is_refused_BK.any(axis=1), is_refused_BK.argmax(axis=1), K)
        return judge(replace(round, counts_B=np.minimum(round.counts_B, first_B)))

    found = markov.distances(markov.run_chains(REFUSED, cut), REFUSED.target_VV)
    assert max(found.values()) > 2 * LIMIT, found


def probabilities(logits_BJV):
    weights = np.exp(logits_BJV)
    return weights / weights.sum(axis=-1, keepdims=True)


def cooled(logits_BJV, first=None):
    """Temperature 2 and top-p 0.75, in vLLM's order or with top-p first."""
    last = {None: {"temperature": 2.0, "top_p": 0.75}, "top_p": {"temperature": 2.0}}[first]
    table = filtered(markov.TARGET, {"top_p": 0.75}) if first else markov.TARGET
    ids = np.abs(probabilities(logits_BJV)[..., None, :] - markov.TARGET).sum(axis=-1).argmin(axis=-1)
    return filtered(table, last)[ids]


# What each shows with: most with drafts that were drawn.
SHOWS_WITH = {"residual keeps the draft": "argmax", "bonus from the row before": "equal"}


BLOCK_FAULTS = [
    ("keeps the shortest that stands", "sampled"),
    ("stops at the first that does not", "sampled"),
    ("one uniform for all places", "sampled"),
    ("stands with its ratio alone", "sampled"),
    ("forgets the scale", "sampled"),
    ("draws from the unscaled excess", "holes"),
]


@pytest.mark.parametrize("name", heavy_but(DRAFTERS, lambda name: name == "sampled"))
@pytest.mark.parametrize("sampler", [faults.sampler, faults.block])
def test_the_check_passes_a_right_sampler(sampler, name):
    drafter = DRAFTERS[name]
    found = markov.distances(markov.run_chains(drafter, sampler(probabilities, None)), drafter.target_VV)
    assert max(found.values()) < LIMIT, found


@pytest.mark.parametrize(("fault", "name"), heavy_but_first(BLOCK_FAULTS))
def test_the_check_fails_a_faulty_block_sampler(fault, name):
    drafter = DRAFTERS[name]
    found = markov.distances(markov.run_chains(drafter, faults.block(probabilities, fault)), drafter.target_VV)
    assert max(found.values()) > 1.5 * LIMIT, found


@pytest.mark.parametrize("fault", heavy_but(faults.SAMPLED_FAULTS, lambda fault: fault == faults.SAMPLED_FAULTS[0]))
def test_the_check_fails_a_faulty_sampler(fault):
    drafter = DRAFTERS[SHOWS_WITH.get(fault, "sampled")]
    found = markov.distances(markov.run_chains(drafter, faults.sampler(probabilities, fault)), drafter.target_VV)
    assert max(found.values()) > 2 * LIMIT, found


def test_a_wrong_bonus_shows_only_at_the_last_position():
    found = markov.distances(
        markov.run_chains(DRAFTERS["equal"], faults.sampler(probabilities, "bonus from the row before")), markov.TARGET
    )
    assert found["last"] > 0.1
    assert max(found["first"], found["first_two"]) < LIMIT


def test_the_check_fails_filters_in_the_wrong_order():
    """B2 of behaviours.md: top-p before temperature."""
    expected = filtered(markov.TARGET, {"temperature": 2.0, "top_p": 0.75})
    for first, is_right in ((None, True), ("top_p", False)):
        judge = faults.sampler(functools.partial(cooled, first=first), None)
        found = markov.distances(markov.run_chains(DRAFTERS["sampled"], judge, num_chains=50_000), expected)
        assert (max(found.values()) < 2 * LIMIT) == is_right, found


def test_the_check_fails_drafts_that_were_not_drawn_from_their_logits():
    """jaxspec's own verify, told a sharper q than the drafts were drawn from."""
    judge = jaxspec_judge("standard")

    def sharper(round: Round) -> np.ndarray:
        return judge(replace(round, draft_logits_BKV=round.draft_logits_BKV * 2))

    found = markov.distances(markov.run_chains(DRAFTERS["sampled"], sharper), markov.TARGET)
    assert max(found.values()) > 2 * LIMIT, found


def test_the_check_fails_rounds_that_repeat_their_random_numbers():
    """jaxspec's own verify, told the same anchor every round: its draws are then made again."""
    judge = jaxspec_judge("standard")

    def stuck(round: Round) -> np.ndarray:
        return judge(replace(round, len_B=np.full_like(round.len_B, 3)))

    found = markov.distances(markov.run_chains(DRAFTERS["argmax"], stuck), markov.TARGET)
    assert max(found.values()) > 2 * LIMIT, found


def differences(judge, name):
    """Tokens that differ from plain greedy decoding of each chain, out of all; drafts are ragged."""
    rng = np.random.default_rng(3)

    def ragged(round: Round) -> np.ndarray:
        return judge(replace(round, counts_B=rng.integers(0, round.counts_B + 1)))

    drafter = DRAFTERS[name]
    tokens = markov.run_chains(drafter, ragged, num_chains=4000)
    token_B, wrong = np.full(len(tokens), markov.FIRST), 0
    for place in range(tokens.shape[1]):
        token_B = drafter.target_VV[token_B].argmax(axis=1)
        wrong += int((tokens[:, place] != token_B).sum())
    return wrong


@pytest.mark.parametrize("name", heavy_but(DRAFTERS, lambda name: name in ("sampled", "ngram")))
@pytest.mark.parametrize("rule", RULES)
def test_greedy_tokens_are_plain_decodings(rule, name):
    assert differences(jaxspec_judge(rule, temperature=0.0, top_k=2, top_p=0.5), name) == 0


@pytest.mark.parametrize("fault", faults.GREEDY_FAULTS)
def test_greedy_faults_are_noticed(fault):
    assert differences(faults.greedy(None), "sampled") == 0
    assert differences(faults.greedy(fault), "sampled") > 0


def test_every_drafter_is_what_it_claims():
    """The cases are those of users.md T1: q = p, q apart from p, q = 0 where p > 0."""
    assert (K, V) == (3, 8)
    assert (DRAFTERS["equal"].draft_VV == DRAFTERS["equal"].target_VV).all()
    disjoint, holes = DRAFTERS["disjoint"], DRAFTERS["holes"]
    assert ((disjoint.target_VV > 0) & (disjoint.draft_VV > 0)).sum() == 0
    assert ((holes.target_VV > 0) & (holes.draft_VV == 0)).any(axis=1).all()
