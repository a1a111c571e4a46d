"""Host. T1: sampled tokens have the target's distribution, greedy ones are the target's; the check notices faults."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rejection.verify import verify
from jaxspec.types import Drafts, SamplingTable
from tests.lossless import faults, markov
from tests.lossless.markov import DRAFTERS, LIMIT, K, Round, V
from tests.rejection.numpy_reference import Row, kept_logits, softmax

FILTERS = {
    "none": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 0.7, "top_k": 3, "top_p": 0.8, "min_p": 0.1},
}


CHUNK = 25_000  # chains in one call: few calls, and arrays that stay in the cache


@functools.partial(jax.jit, static_argnames="rule")
def verdict(logits_BJV, drafts, table, anchor_B, rule):
    return verify(logits_BJV, drafts, table, anchor_B, rule=rule).token_ids_BJ


def jaxspec_judge(rule, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5):
    """jaxspec's verify as a judge; every chain is a request with a key of its own."""
    keys = np.random.default_rng(seed).integers(2**32, size=(markov.NUM_CHAINS, 2), dtype=np.uint32)

    def judge(round: Round) -> np.ndarray:
        B = len(round.counts_B)
        return np.concatenate([chunk(round, np.arange(at, at + CHUNK) % B) for at in range(0, B, CHUNK)])[:B]

    def chunk(round: Round, rows: np.ndarray) -> np.ndarray:
        table = SamplingTable(
            temperature_B=jnp.full(CHUNK, temperature, jnp.float32),
            top_k_B=jnp.full(CHUNK, top_k, jnp.int32),
            top_p_B=jnp.full(CHUNK, top_p, jnp.float32),
            min_p_B=jnp.full(CHUNK, min_p, jnp.float32),
            presence_B=jnp.zeros(CHUNK, jnp.float32),
            frequency_B=jnp.zeros(CHUNK, jnp.float32),
            repetition_B=jnp.ones(CHUNK, jnp.float32),
            key_B2=jnp.asarray(keys[round.chain_B[rows]]),
        )
        logits = round.draft_logits_BKV
        drafts = Drafts(
            token_ids_BK=jnp.asarray(round.ids_BK[rows], jnp.int32),
            counts_B=jnp.asarray(round.counts_B[rows], jnp.int32),
            logits_BKV=None if logits is None else jnp.asarray(logits[rows], jnp.float32),
        )
        logits_BJV = jnp.asarray(round.logits_BJV[rows], jnp.float32)
        return np.asarray(verdict(logits_BJV, drafts, table, jnp.asarray(round.len_B[rows], jnp.int32), rule))

    return judge


def filtered(table_VV, filters):
    """The target's table under the same filters, by sorting in float64."""
    with np.errstate(divide="ignore"):
        return np.stack(
            [softmax(kept_logits(row, Row((0, 0), **{"temperature": 1.0} | filters))) for row in np.log(table_VV)]
        )


CASES = [(name, filters) for filters in ("none", "all") for name in DRAFTERS]
CASES += [(name, filters) for filters in ("temperature", "top_k", "top_p", "min_p") for name in ("sampled", "argmax")]


@pytest.mark.parametrize(("name", "filters"), CASES)
@pytest.mark.parametrize("rule", ["standard", "coupled"])
def test_sampled_tokens_have_the_targets_distribution(rule, name, filters):
    drafter = DRAFTERS[name]
    tokens = markov.run_chains(drafter, jaxspec_judge(rule, **FILTERS[filters]))
    found = markov.distances(tokens, filtered(drafter.target_VV, FILTERS[filters]))
    assert max(found.values()) < LIMIT, found


def probabilities(logits_BJV):
    weights = np.exp(logits_BJV)
    return weights / weights.sum(axis=-1, keepdims=True)


def cooled(logits_BJV, first=None):
    """Temperature 2 and top-p 0.75, in vLLM's order or with top-p first."""
    last = {None: {"temperature": 2.0, "top_p": 0.75}, "top_p": {"temperature": 2.0}}[first]
    table = filtered(markov.TARGET, {"top_p": 0.75}) if first else markov.TARGET
    ids = np.abs(probabilities(logits_BJV)[..., None, :] - markov.TARGET).sum(axis=-1).argmin(axis=-1)
    return filtered(table, last)[ids]


SAMPLED_FAULTS = [
    ("draft and accept share a uniform", "sampled"),
    ("accept and resample share a uniform", "sampled"),
    ("residual is the target", "sampled"),
    ("residual is the target without the draft", "sampled"),
    ("residual keeps the draft", "argmax"),
    ("accepts with p alone", "sampled"),
    ("bonus from the row before", "equal"),
]


def test_the_check_passes_a_right_sampler():
    for name, drafter in DRAFTERS.items():
        found = markov.distances(markov.run_chains(drafter, faults.sampler(probabilities, None)), drafter.target_VV)
        assert max(found.values()) < LIMIT, (name, found)


@pytest.mark.parametrize(("fault", "name"), SAMPLED_FAULTS)
def test_the_check_fails_a_faulty_sampler(fault, name):
    drafter = DRAFTERS[name]
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


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("rule", ["standard", "coupled"])
def test_greedy_tokens_are_plain_decodings(rule, name):
    assert differences(jaxspec_judge(rule, temperature=0.0, top_k=2, top_p=0.5), name) == 0


GREEDY_FAULTS = [
    "emits the rejected draft",
    "goes on after a rejection",
    "bonus always from row K",
    "judges a draft by the row after",
    "divides by a temperature of -1",
]


@pytest.mark.parametrize("fault", GREEDY_FAULTS)
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
