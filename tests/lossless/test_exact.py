"""Device. `exact`: every round has one row shape, so a token's logits do not depend on what was drafted beside it."""

import functools

import jax
import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.step import pack, rounds
from tests.lossless.engines import MAX_MODEL_LEN, custom, make_engine, ngram
from tests.lossless.replay import HostReplay, Script, replay_proposer, set_scripts
from tests.oracle.folders import write_llama

K = 3
PROMPT = [1, 2, 3, 4, 5, 6, 7]
GREEDY = SamplingParams(temperature=0, max_tokens=30)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # Wide enough for products whose order of summation depends on the number of rows.
    return write_llama(
        tmp_path_factory.mktemp("exact") / "target", seed=4, vocab_size=512, hidden_size=64, intermediate_size=128
    )


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.heavy)])
def test_a_tokens_logits_are_the_same_to_the_last_bit_whatever_was_drafted(model, dtype):
    proposer = replay_proposer(K, MAX_MODEL_LEN)
    engine = make_engine(model, custom(K), proposer=proposer, dtype=dtype, exact=True)

    def logits_TV(scripts):
        set_scripts(engine, proposer, scripts)
        traced = engine.trace({"prompt_token_ids": PROMPT}, GREEDY)
        drafted = {len(one.draft_token_ids) for one in traced}
        ids = [token_id for one in traced for token_id in one.token_ids]
        return ids, drafted, np.concatenate([one.target_logits_JV[: len(one.token_ids)] for one in traced])

    ids, drafted, plain_TV = logits_TV([])
    assert drafted == {0}
    assert len(plain_TV) == 30
    wrong = dict.fromkeys(range(len(PROMPT) + 2, 40, 3), 0)
    counts = {place: place % 3 for place in range(40)}
    for script in (Script(PROMPT + ids), Script(PROMPT + ids, wrong=wrong), Script(PROMPT + ids, num_drafts=counts)):
        said, drafted, drafted_TV = logits_TV([script])
        assert max(drafted) > 0
        assert said == ids
        np.testing.assert_array_equal(drafted_TV, plain_TV)
        assert engine.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == ids


def widths(engine):
    """The numbers of positions that a round's program runs the target over."""
    parts, seen = engine.core.parts, []

    def forward(weights, config, tokens, pool, aux_streams=()):
        seen.append(tokens.token_ids_BT.shape[1])
        return parts.target.family.forward(weights, config, tokens, pool, aux_streams)

    target = parts.target._replace(family=parts.target.family._replace(forward=forward))
    shapes = parts.programs.shapes
    batch = pack.pack_batch([], [], shapes.batch_rows[-1], shapes.guard_row, shapes.pages_per_row)
    jax.eval_shape(
        functools.partial(rounds.decode_round, target, parts.proposer), parts.weights, engine.core.state, batch
    )
    return set(seen)


@pytest.fixture(scope="module")
def engines(model):
    """By whether they are exact."""
    return {exact: make_engine(model, ngram(K), exact=exact, buckets=exact) for exact in (True, False)}


def test_a_round_without_drafts_runs_all_positions_only_where_exact(engines):
    assert widths(engines[True]) == {K + 1}
    assert widths(engines[False]) == {K + 1, 1}


def test_an_exact_engine_has_one_bucket_of_each_kind(engines):
    shapes = engines[True].core.parts.programs.shapes
    assert len(shapes.batch_rows) == len(shapes.chunk_tokens) == 1


def test_float32_products_are_asked_for_in_full(engines):
    """On CPU they always are; what is asked of an accelerator shows in the program."""
    hidden = jax.ShapeDtypeStruct((1, 2, 64), np.float32)
    for exact, engine in engines.items():
        parts = engine.core.parts
        logits = functools.partial(_logits, parts.target)
        assert ("HIGHEST" in jax.jit(logits).lower(parts.weights["target"], hidden).as_text()) == exact


def _logits(target, weights, hidden):
    return target.family.logits(weights, target.config, hidden)


@pytest.mark.heavy
def test_a_host_drafter_without_a_guess_runs_the_same_program(model):
    engine = make_engine(model, custom(K), proposer=HostReplay(K), exact=True)
    called = []
    programs = engine.core.parts.programs
    verify_commit = programs.verify_commit
    programs.verify_commit = lambda weights, state, batch, drafts: (
        called.append(drafts.token_ids_BK.shape[1]),
        verify_commit(weights, state, batch, drafts),
    )[1]
    engine.generate({"prompt_token_ids": PROMPT}, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert called == [K] * 3
