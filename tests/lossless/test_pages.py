"""Device. T12 and T13: pages are conserved whatever comes and goes, nothing is read that its request did not write, and
nothing is written where no request is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import SamplingParams
from tests.lossless.engines import VOCAB_SIZE, custom, draft_model, make_engine, ngram
from tests.lossless.replay import HostReplay, Script, replay_proposer, set_scripts
from tests.oracle.folders import write_folder
from tests.oracle.llama import NumpyLlama, assert_says, continuation, row_of
from tests.quick import heavy_but

MAX_LEN = 48
K = 3


def poison_pages(core, pages) -> None:
    """NaN in these pages of every layer, the drafter's too."""
    num_pages = core.config.num_pages
    is_bad_P = np.zeros(num_pages, bool)
    is_bad_P[list(pages)] = True

    def spoil(pool):
        is_bad = jnp.asarray(np.tile(is_bad_P, pool.shape[0] // num_pages))
        return jnp.where(is_bad[:, None, None, None], jnp.nan, pool)

    proposer = jax.tree.map(lambda leaf: spoil(leaf) if leaf.ndim == 4 else leaf, core.state.proposer)
    core.state = dataclasses.replace(core.state, pool=spoil(core.state.pool), proposer=proposer)


CASES = [(1, "ngram"), (4, "draft_model"), (16, "probabilistic"), (4, "plain"), (4, "ahead")]


@pytest.fixture(scope="module", params=heavy_but(CASES, lambda case: case[1] in ("ngram", "ahead")), ids=str)
def engine(request, target, drafter):
    block_size, method = request.param
    config = {
        "plain": None,
        "ngram": ngram(K),
        "ahead": ngram(K),
        "draft_model": draft_model(K, drafter),
        "probabilistic": draft_model(K, drafter, "probabilistic"),
    }[method]
    # Three rows, and pages for hardly half of what they may need: rows and pages both run short at times.
    num_pages = 3 * MAX_LEN // 2 // block_size
    settings = {"block_size": block_size, "num_pages": num_pages, "max_model_len": MAX_LEN}
    if method == "ahead":
        settings |= {"async_scheduling": True, "rounds_per_batch": 2}
    return make_engine(target, config, compilation_cache_dir=None, **settings)


def test_random_schedules_over_poisoned_pages(engine, target_oracle):
    """Requests come, end, are aborted and lose their pages at random, and many begin alike; after every step all pages
    that mean nothing are NaN again."""
    rng = np.random.default_rng(0)
    core, (scheduler,) = engine.core, engine.core.scheduler.each
    requests, answers, num_steps, num_preempted, num_ahead = {}, {}, 0, 0, 0
    while num_steps < 120 or core.has_work:
        num_steps += 1
        if num_steps < 120 and rng.random() < 0.3:
            name = str(len(requests))
            length = int(rng.choice([1, 3, 4, 5, 15, 16, 17, 30, MAX_LEN - 1]))
            prompt = np.tile(rng.integers(0, VOCAB_SIZE, 6), 10)
            if rng.random() < 0.5:  # what others begin with, and their answers
                others = [ids for r in requests.values() for ids in (r.sequences[0].state.token_ids,)]
                start = others[rng.integers(len(others))] if others else [7] * 9
                prompt = np.concatenate([start[: rng.integers(1, len(start) + 1)], prompt])
            prompt = prompt[:length].tolist()
            params = SamplingParams(temperature=0, max_tokens=int(rng.integers(1, 24)), ignore_eos=True)
            requests[name] = core.add_request(name, {"prompt_token_ids": prompt}, params)
            answers[name] = (prompt, min(params.max_tokens, MAX_LEN - length))
        core.step()
        scheduler.audit()
        allocator = scheduler.allocator
        assert len(allocator.free_pages) + allocator.num_cached + allocator.num_used == core.config.num_pages
        held = {p for r in requests.values() for s in r.sequences for p in s.state.pages}
        assert len(held) == allocator.num_used
        if requests and rng.random() < 0.1:
            core.abort(rng.choice(list(requests)))
            scheduler.audit()
        num_ahead += core._launched is not None
        if core.scheduler.num_running and core._launched is None and rng.random() < 0.05:
            scheduler.preempt(scheduler.decoding[-1] if scheduler.decoding else scheduler._prefilling[-1])
            num_preempted += 1
        poison_pages(core, allocator.free_pages)
    assert scheduler.allocator.num_used == 0
    num_finished = 0
    for name, request in requests.items():
        (completion,) = request.output().outputs
        prompt, num_tokens = answers[name]
        answer = continuation(target_oracle, prompt, num_tokens)
        if completion.finish_reason == "abort":
            assert_says(completion.token_ids, answer.cut(len(completion.token_ids)))
        else:
            assert_says(completion.token_ids, answer)
            num_finished += 1
    assert num_finished > 10
    assert num_ahead > 10 if core.config.async_scheduling else num_ahead == 0
    figures = core.metrics.snapshot()
    assert num_preempted + figures["vllm:num_preemptions"] > 3
    if core.config.block_size < 16:  # four pages are gone before anyone asks for them again
        assert figures["vllm:prefix_cache_hits"] > 0


@pytest.mark.heavy
def test_one_request_may_fill_the_pool(target, target_oracle):
    """It runs to its end, and whoever waits runs after it."""
    engine = make_engine(target, ngram(K), num_pages=MAX_LEN // 4, max_model_len=MAX_LEN)
    prompts = [[1, 2, 3], [4] * 20, [5]]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.outputs[0].finish_reason == "length"
        assert_says(output.outputs[0].token_ids, continuation(target_oracle, prompt, MAX_LEN - len(prompt)))


@pytest.fixture(scope="module")
def guarded(target, tmp_path_factory):
    """The target with one more token, whose embedding is NaN: where ids of -1 and past the end would land."""
    weights = load_file(target / "model.safetensors")
    for name, value in (("model.embed_tokens.weight", np.nan), ("lm_head.weight", 0.0)):
        weights[name] = np.concatenate([weights[name], np.full_like(weights[name][:1], value)])
    config = NumpyLlama(target).config | {"vocab_size": VOCAB_SIZE + 1}
    return write_folder(tmp_path_factory.mktemp("guarded") / "model", config, weights)


@pytest.mark.parametrize(
    "method", heavy_but(("plain", "ngram", "probabilistic", "replay", "host"), lambda method: method == "ngram")
)
def test_no_sentinel_is_ever_an_index(guarded, target_oracle, method):
    """An embedding row, pages and table rows of NaN where -1 and clamped indices lead; some rounds accept nothing."""
    proposer = None
    if method in ("replay", "host"):
        proposer = HostReplay(K) if method == "host" else replay_proposer(K, MAX_LEN)
    config = {
        "plain": None,
        "ngram": ngram(K),
        "probabilistic": draft_model(K, guarded, "probabilistic"),
    }.get(method, custom(K))
    # More pages than can be in use: the last of every layer is held by nobody.
    engine = make_engine(guarded, config, proposer=proposer, max_model_len=MAX_LEN, num_pages=3 * MAX_LEN // 4 + 2)
    core = engine.core
    guard = core.parts.programs.shapes.guard_row
    core.state = dataclasses.replace(
        core.state, history_RC=core.state.history_RC.at[guard].set(VOCAB_SIZE), len_R=core.state.len_R.at[guard].set(7)
    )
    requests = [
        ([1, 2, 3, 1, 2, 3, 1], {"temperature": 0.0}),
        ([9], {"temperature": 0.0}),
        ([7] * 17, {"temperature": 1.0, "seed": 4}),
        ([8, 8, 9, 8], {"temperature": 0.0, "max_tokens": None}),
    ]
    requests = [(p, SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | params))) for p, params in requests]
    answers = [
        continuation(target_oracle, prompt, min(params.max_tokens or MAX_LEN, MAX_LEN - len(prompt)), row_of(params))
        for prompt, params in requests
    ]
    if proposer is not None:
        # Ids that are none: right until there, refused where they stand. Nothing at all is accepted of the first row's.
        scripts = []
        for (prompt, _), answer, bad in zip(requests, answers, (-1, -7, VOCAB_SIZE + 1, 2**31 - 1), strict=True):
            every = 1 if bad == -1 else 3
            places = range(len(prompt), len(prompt) + len(answer.token_ids), every)
            scripts.append(Script(prompt + answer.token_ids, wrong=dict.fromkeys(places, bad)))
        set_scripts(engine, proposer, scripts)
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    for output, (_, params), answer in zip(outputs, requests, answers, strict=True):
        ids = output.outputs[0].token_ids
        assert all(0 <= token_id < VOCAB_SIZE for token_id in ids)
        if params.is_greedy:
            assert_says(ids, answer)
    if proposer is not None:
        figures = outputs[0].metrics.speculative_decoding
        assert figures["num_accepted_draft_tokens"] == 0
        assert figures["num_draft_tokens"] > 20

    def last_pages(pool):
        return np.asarray(pool).reshape(-1, core.config.num_pages, *pool.shape[1:])[:, -1]

    for pool in [core.state.pool, *(leaf for leaf in jax.tree.leaves(core.state.proposer) if leaf.ndim == 4)]:
        assert np.isnan(last_pages(pool)).all(), "something was written through an index that means nothing"
    assert (np.asarray(core.state.history_RC[guard]) == VOCAB_SIZE).all()
    assert int(core.state.len_R[guard]) == 7
    assert bool(core.state.is_finished_R[guard])
