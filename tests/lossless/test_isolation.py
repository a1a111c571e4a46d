"""Device. T7 and T8: what a request is answered depends on its seed and itself, not on its row, batch or neighbours."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxspec import SamplingParams
from tests.lossless.engines import SAME_CODE, VOCAB_SIZE, draft_model, make_engine, ngram
from tests.quick import heavy_but

K = 3
METHODS = ("plain", "ngram coupled", "ngram standard", "draft_model", "probabilistic")


@pytest.fixture(scope="module", params=heavy_but(METHODS, lambda name: name == "ngram coupled"))
def engine(request, target, drafter):
    config = {
        "plain": None,
        "ngram coupled": ngram(K),
        "ngram standard": ngram(K) | {"rejection_sample_method": "standard"},
        "draft_model": draft_model(K, drafter),
        "probabilistic": draft_model(K, drafter, "probabilistic"),
    }[request.param]
    # Buckets for some, since a batch of one and a batch of four are different programs; one method as it is shipped.
    buckets = request.param in ("plain", "ngram standard", "probabilistic")
    return make_engine(
        target, config, max_num_seqs=4, buckets=buckets, options=SAME_CODE if request.param == "plain" else None
    )


def make_requests():
    """Eight, no two alike, with an odd one at every place."""
    rng = np.random.default_rng(3)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "top_k": 4, "seed": 2},
        {"temperature": 0.0, "min_tokens": 5, "stop_token_ids": [13, 19, 31]},
        {"temperature": 1.3, "top_p": 0.7, "seed": 3},
        {"temperature": 1.0, "min_p": 0.1, "seed": 1, "frequency_penalty": 0.9, "logprobs": 3},
        {"temperature": 2.0, "top_k": 10, "top_p": 0.9, "min_p": 0.02, "seed": -5},
        {"temperature": 0.5, "seed": 2**40, "stop_token_ids": [4], "logit_bias": {7: 3.0}, "repetition_penalty": 1.4},
    ]
    requests = []
    for index, kind in enumerate(kinds):
        piece = rng.integers(0, VOCAB_SIZE, 5)
        prompt = np.concatenate([piece, rng.integers(0, VOCAB_SIZE, index * 3), piece])
        requests.append(
            (prompt.tolist(), SamplingParams(**({"max_tokens": 10 + 3 * (index % 4), "ignore_eos": True} | kind)))
        )
    return requests


def generate(engine, requests):
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    outputs = engine.generate(prompts, [params for _, params in requests], use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(engine):
    """What each says with the engine to itself."""
    return [generate(engine, [request])[0] for request in make_requests()]


def test_together(engine, alone):
    assert generate(engine, make_requests()) == alone


@pytest.mark.parametrize("seed", range(4))
def test_permuted(engine, alone, seed):
    order = np.random.default_rng(seed).permutation(8)
    requests = make_requests()
    assert generate(engine, [requests[at] for at in order]) == [alone[at] for at in order]


@pytest.mark.parametrize("odd", range(4))
def test_one_odd_row_among_copies(engine, alone, odd):
    """A greedy row between sampled ones, and a sampled one between greedy ones, in each of the four rows."""
    requests = make_requests()
    for one, other in ((0, 1), (1, 0), (6, 0), (2, 7), (5, 4)):
        batch = [one if row == odd else other for row in range(4)]
        assert generate(engine, [requests[at] for at in batch]) == [alone[at] for at in batch]


@pytest.mark.parametrize("seed", range(3))
def test_neighbours_come_and_are_aborted(engine, alone, seed):
    """Half of the requests are ended somewhere; the others never notice, nor do those that take their rows."""
    rng = np.random.default_rng(seed)
    core, requests = engine.core, make_requests()
    victims = set(rng.permutation(8)[:4].tolist())
    running = {}
    for index in rng.permutation(8).tolist():
        running[index] = core.add_request(
            f"{seed}-{index}", {"prompt_token_ids": requests[index][0]}, requests[index][1]
        )
        for _ in range(rng.integers(0, 4)):
            core.step()
            if victims and rng.random() < 0.4:
                victim = victims.pop()
                core.abort(f"{seed}-{victim}")
        core.scheduler.audit()
    for victim in victims:
        core.abort(f"{seed}-{victim}")
    while core.has_work:
        core.step()
    for index, request in running.items():
        (completion,) = request.output().outputs
        if completion.finish_reason == "abort":
            assert completion.token_ids == alone[index][: len(completion.token_ids)]
        else:
            assert completion.token_ids == alone[index]


def test_a_seed_gives_the_same_in_another_row_after_other_work(engine, alone):
    requests = make_requests()
    for count in (1, 2, 3):
        unseeded = [
            (prompt, dataclasses.replace(params, seed=None, temperature=1.0)) for prompt, params in requests[:count]
        ]
        assert generate(engine, [*unseeded, requests[2]])[-1] == alone[2]


def test_unseeded_copies_differ(engine):
    prompt, _ = make_requests()[0]
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    answers = generate(engine, [(prompt, params)] * 3) + generate(engine, [(prompt, params)])
    assert all(a != b for a, b in itertools.combinations(answers, 2))


def test_choices_of_one_request_differ_and_repeat(engine):
    prompt, _ = make_requests()[0]
    params = SamplingParams(n=4, temperature=1.0, max_tokens=20, seed=9, ignore_eos=True)
    (first,), (second,) = (engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False) for _ in range(2))
    answers = [completion.token_ids for completion in first.outputs]
    assert [completion.index for completion in first.outputs] == [0, 1, 2, 3]
    assert all(a != b for a, b in itertools.combinations(answers, 2))
    assert answers == [completion.token_ids for completion in second.outputs]
    # The first choice is what n = 1 says, and the choices of more are those of fewer.
    assert generate(engine, [(prompt, dataclasses.replace(params, n=1))]) == answers[:1]


def test_a_greedy_row_draws_nothing(engine, alone):
    prompt, params = make_requests()[0]
    for seed in (1, 2):
        assert generate(engine, [(prompt, dataclasses.replace(params, seed=seed))]) == alone[:1]


def test_different_seeds_say_different_things(engine, alone):
    requests = make_requests()
    assert alone[1] != generate(engine, [(requests[1][0], dataclasses.replace(requests[1][1], seed=77))])[0]
