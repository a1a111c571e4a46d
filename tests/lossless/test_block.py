"""Host. Block verification: exact by enumeration, no shorter than standard, and unbiased over many rounds."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas_kernels.rejection.block import (
    joint_log_ratios,
    point_mass_residual_masses,
    residual_masses,
    thresholds,
)
from jaxspec.rejection.verify import verify
from jaxspec.sampling.table import neutral_table
from jaxspec.types import Drafts
from tests.lossless import faults, markov
from tests.lossless.judge import jaxspec_judge


def random_tables(seed, vocab_size, length, spread=1.5):
    """{prefix: distribution} for every prefix shorter than `length`: each prefix has its own."""
    rng = np.random.default_rng(seed)
    prefixes = itertools.chain.from_iterable(itertools.product(range(vocab_size), repeat=n) for n in range(length))
    tables = {prefix: np.exp(rng.normal(size=vocab_size) * spread) for prefix in prefixes}
    return {prefix: weights / weights.sum() for prefix, weights in tables.items()}


def one_hot(tables):
    """A drafter that is certain of each table's likeliest token."""
    return {prefix: np.eye(len(prob))[prob.argmax()] for prefix, prob in tables.items()}


def block_chances(target, drafter, block):
    """(chance that the longest standing prefix has 0..g drafts, p_0..p_g), straight from the definition."""
    joint = [1.0]
    for place, token in enumerate(block):
        prefix = block[:place]
        joint.append(min(joint[-1] * target[prefix][token] / drafter[prefix][token], 1.0))
    h = []
    for place in range(1, len(block) + 1):
        prefix = block[:place]
        left = np.maximum(joint[place] * target[prefix] - drafter[prefix], 0).sum() if place < len(block) else 0.0
        inner = left / (left + 1 - joint[place]) if left + 1 - joint[place] > 0 else 1.0
        h.append(inner if place < len(block) else joint[place])
    beyond = [float(np.prod([1 - stands for stands in h[place:]])) for place in range(len(block) + 1)]
    return [beyond[0], *(h[place - 1] * beyond[place] for place in range(1, len(block) + 1))], joint


def enumerated(target, drafter, num_drafts, vocab_size):
    """(joint of the next num_drafts + 1 tokens, expected accepted drafts) of one round, then plain decoding."""
    out, accepted = np.zeros((vocab_size,) * (num_drafts + 1)), 0.0
    for block in itertools.product(range(vocab_size), repeat=num_drafts):
        weight = np.prod([drafter[block[:place]][token] for place, token in enumerate(block)])
        if weight == 0:
            continue
        chances, joint = block_chances(target, drafter, block)
        for tau, chance in enumerate(chances):
            accepted += weight * chance * tau
            rest = target[block[:tau]]
            if tau < num_drafts:
                rest = np.maximum(joint[tau] * rest - drafter[block[:tau]], 0)
            if chance == 0:
                continue
            for tail in itertools.product(range(vocab_size), repeat=num_drafts + 1 - tau):
                path = block[:tau] + tail
                after = np.prod([target[path[:place]][path[place]] for place in range(tau + 1, num_drafts + 1)])
                out[path] += weight * chance * rest[tail[0]] / rest.sum() * after
    return out, accepted


def standard_accepted(target, drafter, num_drafts, vocab_size):
    total = 0.0
    for block in itertools.chain.from_iterable(
        itertools.product(range(vocab_size), repeat=n) for n in range(1, num_drafts + 1)
    ):
        total += np.prod([min(target[block[:i]][token], drafter[block[:i]][token]) for i, token in enumerate(block)])
    return total


CASES = [(seed, 2, 2) for seed in range(6)] + [(seed, 3, 2) for seed in range(6)] + [(7, 2, 3), (8, 3, 3), (9, 2, 4)]


@pytest.mark.parametrize("is_one_hot", [False, True])
@pytest.mark.parametrize(("seed", "vocab_size", "num_drafts"), CASES)
def test_the_definition_is_lossless_and_keeps_no_fewer_drafts(seed, vocab_size, num_drafts, is_one_hot):
    target = random_tables(seed, vocab_size, num_drafts + 1)
    drafter = random_tables(seed + 100, vocab_size, num_drafts + 1)
    drafter = one_hot(drafter) if is_one_hot else drafter
    joint, accepted = enumerated(target, drafter, num_drafts, vocab_size)
    for path in itertools.product(range(vocab_size), repeat=num_drafts + 1):
        expected = np.prod([target[path[:place]][token] for place, token in enumerate(path)])
        assert joint[path] == pytest.approx(expected, abs=1e-9)
    assert accepted >= standard_accepted(target, drafter, num_drafts, vocab_size) - 1e-12


def test_the_worked_example():
    """behaviours.md 2.5: two tokens, two drafts, 1.25 against 1.19."""
    target = {prefix: np.array([[0.8, 0.2], [0.3, 0.7], [0.6, 0.4]][len(prefix)]) for prefix in prefixes(2, 3)}
    drafter = {prefix: np.array([[0.5, 0.5], [0.6, 0.4], [0.5, 0.5]][len(prefix)]) for prefix in prefixes(2, 3)}
    assert enumerated(target, drafter, 2, 2)[1] == pytest.approx(1.25)
    assert standard_accepted(target, drafter, 2, 2) == pytest.approx(1.19)


def prefixes(vocab_size, length):
    return itertools.chain.from_iterable(itertools.product(range(vocab_size), repeat=n) for n in range(length))


@pytest.mark.parametrize("is_one_hot", [False, True])
@pytest.mark.parametrize(("seed", "vocab_size", "num_drafts"), CASES)
def test_the_codes_thresholds_are_those_of_the_definition(seed, vocab_size, num_drafts, is_one_hot):
    """All blocks as segments of one flattened array, in float64."""
    target = random_tables(seed, vocab_size, num_drafts + 1)
    drafter = random_tables(seed + 100, vocab_size, num_drafts + 1)
    drafter = one_hot(drafter) if is_one_hot else drafter
    blocks = [
        block
        for block in itertools.product(range(vocab_size), repeat=num_drafts)
        if np.prod([drafter[block[:place]][token] for place, token in enumerate(block)]) > 0
    ]
    paths = [(block[:place], token) for block in blocks for place, token in enumerate(block)]
    p_NV = np.stack([target[prefix] for prefix, _ in paths])
    q_NV = np.stack([drafter[prefix] for prefix, _ in paths])
    ids = np.array([token for _, token in paths])
    n = np.arange(len(ids))
    with jax.enable_x64(True), np.errstate(divide="ignore"):
        ratio_N = jnp.asarray(np.log(p_NV[n, ids]) - np.log(q_NV[n, ids]))
        before_N, after_N = joint_log_ratios(ratio_N, jnp.asarray(n % num_drafts == 0), num_drafts)
        if is_one_hot:
            mass_N = point_mass_residual_masses(jnp.asarray(np.log(p_NV[n, ids])), before_N)
        else:
            mass_N = residual_masses(jnp.asarray(np.log(p_NV)), jnp.asarray(np.log(q_NV)), before_N)
        found = np.asarray(thresholds(after_N, mass_N, jnp.asarray(n % num_drafts == num_drafts - 1)))
    for index, block in enumerate(blocks):
        chances, joint = block_chances(target, drafter, block)
        own = slice(index * num_drafts, (index + 1) * num_drafts)
        np.testing.assert_allclose(np.exp(after_N[own]), joint[1:], atol=1e-9)
        beyond = np.cumprod((1 - found[own])[::-1])[::-1]
        np.testing.assert_allclose(found[own] * np.append(beyond[1:], 1), chances[1:], atol=1e-9)


@functools.partial(jax.jit, static_argnames="rule")
def accepted(logits_BJV, drafts, key_B2, rule):
    table = neutral_table(len(key_B2)).replace(temperature_B=jnp.ones(len(key_B2)), key_B2=key_B2)
    return verify(logits_BJV, drafts, table, jnp.full(len(key_B2), 5, jnp.int32), rule=rule).num_accepted_B


@pytest.mark.parametrize("seed", range(3))
def test_verdicts_keep_as_many_as_the_definition(seed):
    """Drafts drawn from the drafter's tree, judged under target's; the mean accepted against its expectation."""
    num_rows, vocab_size, num_drafts = 20_000, 3, 3
    target = random_tables(seed, vocab_size, num_drafts + 1)
    drafter = random_tables(seed + 50, vocab_size, num_drafts + 1)
    rng = np.random.default_rng(seed)
    ids = np.zeros((num_rows, 0), np.int64)
    p, q = [], []
    for place in range(num_drafts + 1):
        codes = (ids @ vocab_size ** np.arange(place)[::-1]) if place else np.zeros(num_rows, np.int64)
        nodes = list(itertools.product(range(vocab_size), repeat=place))
        p.append(np.stack([target[node] for node in nodes])[codes])
        if place < num_drafts:
            q.append(np.stack([drafter[node] for node in nodes])[codes])
            token = (np.cumsum(q[-1], axis=1) < rng.random((num_rows, 1))).sum(axis=1)
            ids = np.concatenate([ids, np.minimum(token, vocab_size - 1)[:, None]], axis=1)
    drafts = Drafts(
        jnp.asarray(ids, jnp.int32),
        jnp.full(num_rows, num_drafts, jnp.int32),
        jnp.asarray(np.log(np.stack(q, axis=1)), jnp.float32),
    )
    logits = jnp.asarray(np.log(np.stack(p, axis=1)), jnp.float32)
    keys = jnp.asarray(rng.integers(2**32, size=(num_rows, 2), dtype=np.uint32))
    means = {rule: float(accepted(logits, drafts, keys, rule).mean()) for rule in ("block", "standard")}
    margin = 5 * num_drafts / 2 / np.sqrt(num_rows)
    assert means["block"] == pytest.approx(enumerated(target, drafter, num_drafts, vocab_size)[1], abs=margin)
    assert means["standard"] == pytest.approx(standard_accepted(target, drafter, num_drafts, vocab_size), abs=margin)
    assert means["block"] > means["standard"]


def two_tokens(stay, leave):
    """A Markov table over two of the tokens: the chance of token 0 after each of them."""
    table = np.eye(markov.V)[np.zeros(markov.V, int)]
    table[0, :2], table[1, :2] = [stay, 1 - stay], [leave, 1 - leave]
    return table


COIN = markov.Drafter(two_tokens(0.4, 0.49), two_tokens(0.67, 0.08))
NUM_NEW = 16  # four rounds at least


def largest_bias(judge):
    """The largest total variation of two tokens in a row, wherever they stand in the answer."""
    tokens = markov.run_chains(COIN, judge, num_new=NUM_NEW)
    step = COIN.target_VV[:2, :2]
    biases = []
    for place in range(NUM_NEW - 1):
        expected = np.linalg.matrix_power(step, place + 1)[markov.FIRST][:, None] * step
        found = np.bincount(tokens[:, place] * 2 + tokens[:, place + 1], minlength=4).reshape(2, 2) / len(tokens)
        biases.append(0.5 * np.abs(found - expected).sum())
    return max(biases)


def probabilities(logits_BJV):
    weights = np.exp(logits_BJV)
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.heavy
def test_draws_of_later_rounds_are_free_of_those_that_decided_the_cut():
    """A draw beyond the cut decides it too. Named by position alone it would be drawn again; T1 of users.md."""
    fresh = largest_bias(jaxspec_judge("block", has_fresh_keys=True))
    assert largest_bias(jaxspec_judge("block")) < 2 * fresh
    assert largest_bias(faults.block(probabilities, None)) < 2 * fresh
    assert largest_bias(faults.block(probabilities, "draws keyed by position")) > 4 * fresh
