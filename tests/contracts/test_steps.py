"""Device. What every step function owes: a state of the same structure, shapes and dtypes, donated, compiled once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling.edit_table import edit_row, mask_words
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.table import table_row
from jaxspec.step import pack, rounds
from jaxspec.step.prefill import admit, prefill
from jaxspec.types import Drafts
from tests.contracts.members import (
    MAX_LEN,
    PAGE_SIZE,
    ROWS,
    V,
    check_step,
    make_proposer,
    make_state,
    make_target,
    make_weights,
    pages_of,
)
from tests.quick import heavy_but, heavy_but_first

PAGES_PER_ROW = MAX_LEN // PAGE_SIZE


def admission(row, temperature=0.0):
    params = SamplingParams(temperature=temperature, top_k=3, top_p=0.9, min_p=0.01)
    return pack.pack_admission(
        row=row, token_ids=[1, 2, 3, 1, 2], num_prompt_tokens=5, max_model_len=MAX_LEN,
        min_len=6, max_len=MAX_LEN, max_drafts=None,
        wants_logprobs=bool(row), stop_ids=[19], sampling=table_row(params, np.array([row, 7], np.uint32)),
        edits=edit_row(params, (), V),
    )  # fmt: skip


METHODS = ("none", "ngram", "draft_model", "probabilistic", "eagle3", "ngram+self")


@pytest.fixture(scope="module", params=heavy_but(METHODS, lambda name: name == "eagle3"))
def proposer(request):
    return make_proposer(request.param)


@pytest.fixture(scope="module")
def ready(proposer):
    return make_ready(proposer)


def make_ready(proposer):
    """(weights, state, batch): two rows with a prompt, one greedy and one sampled, and a padded row."""
    weights, state = make_weights(), make_state(proposer)
    bring_in, fill = (
        jax.jit(functools.partial(admit, proposer)),
        jax.jit(functools.partial(prefill, make_target(), proposer, 4)),
    )
    for row in range(2):
        state = bring_in(state, admission(row, temperature=float(row)))
        state, _ = fill(weights, state, pack.pack_chunk(row, 0, 4, pages_of(row), PAGES_PER_ROW))
    return weights, state, pack.pack_batch([1, 0], [pages_of(1), pages_of(0)], 3, ROWS, PAGES_PER_ROW)


def check_output(packed, num_tokens):
    """Each row's tokens, -1 behind them, then drafts and accepted; the padded row says nothing."""
    packed = np.asarray(packed).reshape(-1, 3, num_tokens + 3)
    ids, counts, accepted = packed[..., : num_tokens + 1], packed[..., -2], packed[..., -1]
    assert (ids < V).all()
    assert ((ids >= 0) == (np.arange(num_tokens + 1) < (ids >= 0).sum(axis=-1)[..., None])).all()
    assert ((accepted >= 0) & (accepted <= counts) & (counts <= num_tokens)).all()
    assert (ids[:, 2] == -1).all()
    assert (counts[:, 2] == 0).all()
    assert (ids[0, :2, 0] >= 0).all()


def test_admit(proposer):
    check_step(functools.partial(admit, proposer), 0, make_state(proposer), admission(1))


def test_prefill(proposer):
    run = functools.partial(prefill, make_target(), proposer, 4)
    chunk = pack.pack_chunk(1, 0, 3, pages_of(1), PAGES_PER_ROW)
    check_step(run, 1, make_weights(), make_state(proposer), chunk)


def test_decode_rounds(proposer, ready):
    max_rounds = 1 if proposer.num_tokens == 0 else 3  # 1 is a program without a loop
    weights, state, batch = ready
    run = functools.partial(rounds.decode_rounds, make_target(), proposer, max_rounds)
    _, output = check_step(run, 1, weights, state, batch, np.int32(max_rounds))
    assert output.packed_BX.shape == (max_rounds, 3, proposer.num_tokens + 3)
    check_output(output.packed_BX, proposer.num_tokens)


def test_the_split_pair(proposer, ready):
    """propose, then verify_commit: each keeps the state's form, and propose changes the proposer's part alone, which
    may be the target's pool."""
    weights, state, batch = ready

    def propose(weights, state, batch):
        drafts, state = rounds.propose(proposer, weights, state, batch)
        return state, drafts

    after, drafts = check_step(propose, 1, weights, state, batch)
    for name in ("history_RC", "len_R", "is_finished_R", *([] if proposer.is_in_target_pool else ["pool"])):
        np.testing.assert_array_equal(getattr(after, name), getattr(state, name))
    run = functools.partial(rounds.verify_commit, make_target(), proposer)
    _, output = check_step(run, 1, weights, after, batch, drafts)
    check_output(output.packed_BX, proposer.num_tokens)


@pytest.mark.parametrize("name", heavy_but(("ngram", "probabilistic", "eagle3"), lambda name: name == "probabilistic"))
def test_all_ways_to_run_a_round_agree(name):
    """The fused round, the split pair and the three parts, from one state: the same tokens and logprobs."""
    proposer, target = make_proposer(name), make_target()
    weights, state, batch = make_ready(proposer)
    fused_state, fused = jax.jit(functools.partial(rounds.decode_round, target, proposer))(weights, state, batch)
    drafts, proposed = jax.jit(functools.partial(rounds.propose, proposer))(weights, state, batch)
    _, split = jax.jit(functools.partial(rounds.verify_commit, target, proposer))(weights, proposed, batch, drafts)
    verified, logits_BJV, seen = jax.jit(functools.partial(rounds.forward, target, proposer))(
        weights, proposed, batch, drafts
    )
    everything_BJU = jnp.full((*logits_BJV.shape[:2], mask_words(V)), 2**32 - 1, jnp.uint32)
    judge = jax.jit(functools.partial(rounds.judge_commit, target, proposer))
    traced_state, traced = judge(verified, batch, drafts, logits_BJV, seen, everything_BJU)
    assert logits_BJV.shape == (3, proposer.num_tokens + 1, V)
    np.testing.assert_array_equal(fused.packed_BX, split.packed_BX)
    np.testing.assert_array_equal(fused.packed_BX, traced.packed_BX)
    for one, other in zip(jax.tree.leaves(fused_state.proposer), jax.tree.leaves(traced_state.proposer), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert np.asarray(fused.logprobs.rank_BJ)[0, 0] >= 1, "the sampled row asked for them"
    for one, other in zip(jax.tree.leaves(fused.logprobs), jax.tree.leaves(traced.logprobs), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


HOST_DRAFTS = [("coupled", 0), ("coupled", 2), ("standard", 0), ("standard", 2)]


@pytest.mark.parametrize(("rule", "count"), heavy_but_first(HOST_DRAFTS, key=lambda case: case[1]))
def test_verification_of_drafts_from_the_host(rule, count):
    state = make_state(make_proposer("none"))
    batch = pack.pack_batch([1, 0], [pages_of(1), pages_of(0)], 3, ROWS, PAGES_PER_ROW)
    drafts = Drafts(token_ids_BK=jnp.zeros((3, count), jnp.int32), counts_B=jnp.asarray([count, 0, 0], jnp.int32))
    run = functools.partial(rounds.verify_commit, make_target(rule), make_proposer("none"))
    _, output = check_step(run, 1, make_weights(), state, batch, drafts)
    assert output.packed_BX.shape == (3, count + 3)
