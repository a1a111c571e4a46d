"""Host. The processed distribution against a sort in float64, and a draw from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.keys import Purpose, request_key, token_key
from jaxspec.sampling.logits import draw, process
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.table import make_table, neutral_table

processed = jax.jit(process)


def table_of(*params):
    return make_table([SamplingParams(**one) for one in params], np.stack([request_key(i) for i in range(len(params))]))


def probabilities(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """What vLLM's order gives: temperature, min-p, top-k, top-p; by sorting, in float64; ties all kept."""
    x = np.asarray(logits_V, np.float64) / temperature
    prob = np.exp(x - x.max())
    prob[prob < min_p * prob.max()] = 0
    if 0 < top_k < len(prob):
        prob[prob < np.sort(prob)[-top_k]] = 0
    prob /= prob.sum()
    order = np.argsort(-prob, kind="stable")
    before = np.cumsum(prob[order]) - prob[order]
    least = prob[order][before < top_p].min()
    prob[prob < least] = 0
    return prob / prob.sum()


FILTERS = [
    {}, {"temperature": 0.7}, {"temperature": 2.0, "top_p": 0.75}, {"top_k": 1}, {"top_k": 3}, {"top_k": 70},
    {"top_k": 10**9}, {"top_p": 0.8}, {"top_p": 1e-6}, {"top_p": 0.99}, {"min_p": 0.1}, {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
]  # fmt: skip


@pytest.mark.parametrize("vocab_size", [8, 300, 5000])  # 5000: more than the blocks that are searched first
@pytest.mark.parametrize("spread", [0.3, 3.0])  # nearly flat: the cutoff lies outside those blocks
def test_the_distribution_is_that_of_a_sort(vocab_size, spread):
    logits_BV = np.random.default_rng(vocab_size).normal(size=(len(FILTERS), vocab_size)) * spread
    logits_BJV = jnp.asarray(logits_BV, jnp.float32)[:, None]
    prob_BV = jax.nn.softmax(processed(logits_BJV, table_of(*FILTERS))[:, 0], axis=-1)
    for row, filters in enumerate(FILTERS):
        expected = probabilities(np.asarray(logits_BJV[row, 0]), **filters)
        np.testing.assert_array_equal(prob_BV[row] > 0, expected > 0, err_msg=str(filters))
        np.testing.assert_allclose(prob_BV[row], expected, rtol=2e-4, atol=1e-7, err_msg=str(filters))


def test_temperature_comes_before_top_p():
    """The order a peer has wrong (behaviours.md B2): .564, .436 if top-p came first."""
    logits = jnp.log(jnp.asarray([[[0.5, 0.3, 0.15, 0.05]]], jnp.float32))
    prob = jax.nn.softmax(processed(logits, table_of({"temperature": 2.0, "top_p": 0.75})))
    np.testing.assert_allclose(prob[0, 0], [0.431, 0.334, 0.236, 0], atol=1e-3)


def test_top_p_counts_what_top_k_left():
    """.4, .3, .2, .1 with top-k 2 is .57, .43: the first alone holds top-p 0.5, which it does not of the whole."""
    logits = jnp.log(jnp.asarray([[[0.4, 0.3, 0.2, 0.1]]], jnp.float32))
    prob = jax.nn.softmax(processed(logits, table_of({"top_k": 2, "top_p": 0.5})))
    np.testing.assert_allclose(prob[0, 0], [1, 0, 0, 0], atol=1e-6)


def test_ties_at_the_cutoff_all_stay():
    logits = jnp.asarray([[[0.0, 2.0, 1.0, 1.0, 1.0, -0.0]]] * 2, jnp.float32)
    kept = processed(logits, table_of({"top_k": 2}, {"top_p": 0.45})) > -jnp.inf
    assert kept[:, 0].tolist() == [[False, True, True, True, True, False]] * 2


def test_greedy_rows_pass_unchanged_beside_sampled_ones():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 40)), jnp.float32)
    out = processed(logits, table_of({"temperature": 0.0, "top_k": 2, "top_p": 0.1, "min_p": 0.9}, {"top_k": 2}))
    np.testing.assert_array_equal(out[0], logits[0])
    assert (out[1] > -jnp.inf).sum(axis=-1).tolist() == [2, 2, 2]
    np.testing.assert_array_equal(processed(logits, neutral_table(2)), logits)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_broken_rows_neither_hang_nor_spread(filters):
    """All NaN, all -inf, +inf, NaN among numbers; and a sound row that must not notice."""
    nan, inf = jnp.nan, jnp.inf
    sound = np.random.default_rng(1).normal(size=5000).astype(np.float32)
    some = sound.copy()
    some[::2] = nan
    rows = [np.full(5000, nan), np.full(5000, -inf), np.where(np.arange(5000) == 7, inf, sound), some, sound]
    logits = jnp.asarray(np.stack(rows), jnp.float32)[:, None]
    out = processed(logits, table_of(*[filters] * 5))[:, 0]
    assert not np.isnan(out).any()
    assert np.argmax(out[2]) == 7
    assert (out[3, ::2] == -inf).all()
    np.testing.assert_array_equal(out[4], processed(logits[4:], table_of(filters))[0, 0])


def test_the_likeliest_token_survives_the_smallest_temperature():
    logits = jnp.asarray([[[3.0, 50.0, -80.0, 50.0]]], jnp.float32)
    out = processed(logits, table_of({"temperature": 1e-5, "top_p": 0.01, "min_p": 1.0}))
    assert (out[0, 0] > -jnp.inf).tolist() == [False, True, False, True]


def test_a_draw_has_the_processed_distribution():
    filters = {"temperature": 0.7, "top_k": 3, "top_p": 0.9}
    logits_V = np.random.default_rng(2).normal(size=200).astype(np.float32) * 2
    logits_BV = jnp.broadcast_to(jnp.asarray(logits_V), (20_000, 200))
    one = table_of(filters)
    table = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[0], (20_000, *leaf.shape[1:])), one)
    keys = token_key(table.key_B2, jnp.arange(20_000), 0, Purpose.DRAFT)
    drawn = jax.jit(draw)(processed(logits_BV[:, None], table)[:, 0], keys, table)
    frequency = np.bincount(drawn, minlength=200) / 20_000
    assert 0.5 * np.abs(frequency - probabilities(logits_V, **filters)).sum() < 0.015


def test_a_draw_of_greedy_rows_is_the_first_arg_max():
    logits_BV = jnp.asarray([[1.0, 3.0, 3.0], [jnp.nan, -1.0, -2.0], [jnp.nan] * 3], jnp.float32)
    keys = jnp.zeros((3, 2), jnp.uint32)
    assert draw(logits_BV, keys, neutral_table(3)).tolist() == [1, 1, 0]
    mixed = table_of({"temperature": 0.0}, {}, {})
    assert draw(logits_BV, keys, mixed)[0] == 1


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 300, 50257])
def test_draws_reach_every_part_of_any_vocabulary(vocab_size):
    """The last block is a partial one: its ids must be found, and never one past the end."""
    for peak in {0, vocab_size // 2, vocab_size - 1}:
        logits = jnp.zeros((1, vocab_size), jnp.float32).at[0, peak].set(100.0)
        keys = jnp.asarray(request_key(peak))[None]
        assert draw(logits, keys, table_of({})).tolist() == [peak]
        assert draw(logits, keys, neutral_table(1)).tolist() == [peak]


def test_a_second_call_does_not_compile():
    logits = jnp.zeros((2, 2, 16), jnp.float32)
    processed(logits, table_of({}, {"top_k": 3}))
    before = processed._cache_size()
    processed(logits + 1, table_of({"temperature": 0.0}, {"top_p": 0.3, "min_p": 0.2}))
    assert processed._cache_size() == before
