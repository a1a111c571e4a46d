"""Device. T1 on the whole engine: what it samples has the target's distribution, for every drafter.

test_distribution.py shows this of verification alone, over tables; here prompts, caches, drafters, keys and batches
take part, and a model whose every distribution is known by enumeration.
"""

import numpy as np
import pytest

from jaxspec import SamplingParams
from tests.lossless.engines import SAME_CODE, draft_model, make_engine, ngram
from tests.oracle.folders import write_like, write_llama
from tests.oracle.llama import NumpyLlama
from tests.quick import heavy_but
from tests.rejection.numpy_reference import Row, kept_logits, softmax

V, K = 8, 3
PROMPT = [1, 2, 1]
NUM_TOKENS = 7
NUM_ANSWERS = 3000
FILTERS = {
    "none": {"temperature": 1.0},
    "all": {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("eight") / "target", seed=8, vocab_size=V, head_spread=0.35)


@pytest.fixture(scope="module")
def drafter(model):
    return write_like(model.parent / "drafter", model, seed=2, noise=0.3)


CASES = [
    ("ngram coupled", ("none", "all")),
    ("ngram standard", ("none",)),
    ("draft_model standard", ("none",)),
    ("probabilistic standard", ("none", "all")),
    ("probabilistic block", ("none",)),
]
QUICK = ("probabilistic standard",)


@pytest.fixture(scope="module", params=heavy_but(CASES, lambda case: case[0] in QUICK), ids=lambda param: param[0])
def case(request, model, drafter):
    """(engine, filters to sample it with)."""
    name, filters = request.param
    method, rule = name.split()
    config = {
        "ngram": ngram(K),
        "draft_model": draft_model(K, drafter),
        "probabilistic": draft_model(K, drafter, "probabilistic"),
    }[method]
    # Optimized programs, since these run long.
    config |= {"rejection_sample_method": rule}
    return make_engine(model, config, max_num_seqs=64, max_model_len=16, block_size=8, options=SAME_CODE), filters


def probabilities(oracle, ids_BT, filters):
    """[B, T, V]: what follows each prefix, filters and all."""
    flat = oracle.logits(ids_BT).reshape(-1, V)
    row = Row((0, 0), **filters)
    return np.stack([softmax(kept_logits(logits_V, row)) for logits_V in flat]).reshape(*np.shape(ids_BT), V)


def usual_distance(prob, num_samples):
    """The mean total variation between a distribution and that many draws from it (normal approximation)."""
    prob = np.ravel(prob)
    return 0.5 * np.sqrt(2 / np.pi * prob * (1 - prob) / num_samples).sum()


@pytest.mark.heavy
def test_sampled_answers_have_the_targets_distribution(case, model):
    engine, names = case
    for name in names:
        check(engine, NumpyLlama(model), FILTERS[name])


def check(engine, oracle, filters):
    params = [
        SamplingParams(n=200, max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed, **filters)
        for seed in range(20, 20 + NUM_ANSWERS // 200)
    ]
    outputs = engine.generate([{"prompt_token_ids": PROMPT}] * len(params), params, use_tqdm=False)
    answers_NT = np.array([completion.token_ids for output in outputs for completion in output.outputs])
    assert answers_NT.shape == (NUM_ANSWERS, NUM_TOKENS)
    drafted = sum(output.metrics.speculative_decoding["num_draft_tokens"] for output in outputs)
    accepted = sum(output.metrics.speculative_decoding["num_accepted_draft_tokens"] for output in outputs)
    assert 0.03 < accepted / drafted < 0.95
    assert drafted > NUM_ANSWERS

    # (a) the first token and (b) the first two, against every possibility.
    first_V = probabilities(oracle, [PROMPT], filters)[0, -1]
    second_VV = probabilities(oracle, [[*PROMPT, token] for token in range(V)], filters)[:, -1]
    pair_VV = first_V[:, None] * second_VV
    found_VV = np.bincount(answers_NT[:, 0] * V + answers_NT[:, 1], minlength=V * V).reshape(V, V) / NUM_ANSWERS
    assert 0.5 * np.abs(found_VV.sum(axis=1) - first_V).sum() < 3 * usual_distance(first_V, NUM_ANSWERS)
    assert 0.5 * np.abs(found_VV - pair_VV).sum() < 1.5 * usual_distance(pair_VV, NUM_ANSWERS)

    # (c) every token given all before it: what came is compared with what the model would have drawn there, summed over
    # answers by position, token before and token. A wrong bonus or a reused key shows here alone.
    prefix_BT = np.concatenate([np.broadcast_to(PROMPT, (NUM_ANSWERS, len(PROMPT))), answers_NT[:, :-1]], axis=1)
    prob_NTV = probabilities_of_distinct(oracle, prefix_BT, filters)[:, len(PROMPT) - 1 :]
    assert (np.take_along_axis(prob_NTV, answers_NT[:, :, None], axis=2) > 0).all(), "a filtered token was drawn"
    came_NTV = np.eye(V)[answers_NT]
    before_NTV = np.eye(V)[prefix_BT[:, len(PROMPT) - 1 :]]
    excess_TVV = np.einsum("ntu,ntv->tuv", before_NTV, came_NTV - prob_NTV)
    variance_TVV = np.einsum("ntu,ntv->tuv", before_NTV, prob_NTV * (1 - prob_NTV))
    usual_TVV = np.sqrt(2 / np.pi * variance_TVV)
    assert np.abs(excess_TVV).sum() < 1.15 * usual_TVV.sum()
    assert (np.abs(excess_TVV) < 5 * np.sqrt(variance_TVV) + 5).all()


def probabilities_of_distinct(oracle, ids_BT, filters):
    """`probabilities`, computing equal rows once."""
    distinct, place_B = np.unique(ids_BT, axis=0, return_inverse=True)
    return probabilities(oracle, distinct, filters)[place_B.reshape(-1)]
