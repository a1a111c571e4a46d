"""Device. T1 under a grammar: what is sampled has the distribution of the masked target, whoever drafts."""

import numpy as np
import pytest

from jaxspec import SamplingParams
from tests.lossless.engines import draft_model, make_engine
from tests.lossless.test_engine_distribution import usual_distance
from tests.oracle.automata import LETTERS, Automaton, add_byte_level_tokenizer
from tests.oracle.folders import write_like, write_llama
from tests.oracle.llama import NumpyLlama
from tests.rejection.numpy_reference import softmax

V, K = 8, 3  # six letters, and two ids that are no text
PROMPT = [1, 2, 1]
NUM_TOKENS = 5
NUM_ANSWERS = 1200
# After a letter come two kinds of letter, after those again others: what is allowed depends on what was drafted.
ALTERNATING = Automaton(
    {"regex": "[a-d]([ef][abc]|[ab][def])*"},
    {
        0: dict.fromkeys("abcd", 1),
        1: dict.fromkeys("ef", 2) | dict.fromkeys("ab", 3),
        2: dict.fromkeys("abc", 1),
        3: dict.fromkeys("def", 1),
    },
    frozenset({1}),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight") / "target"
    write_llama(folder, seed=8, vocab_size=V, head_spread=0.35)
    return add_byte_level_tokenizer(folder, LETTERS[:6])


@pytest.fixture(scope="module")
def drafter(model):
    return write_like(model.parent / "drafter", model, seed=2, noise=0.3)


@pytest.mark.heavy
def test_sampled_answers_have_the_masked_targets_distribution(model, drafter):
    """Of drafts drawn from a q that knows no grammar; `test_distribution.py` has the other drafters and rules."""
    config = draft_model(K, drafter, "probabilistic", rejection_sample_method="standard")
    engine = make_engine(model, config, max_num_seqs=50, max_model_len=16, block_size=8, enable_structured_outputs=True)
    params = [
        SamplingParams(n=200, max_tokens=NUM_TOKENS, seed=seed, structured_outputs=ALTERNATING.constraint)
        for seed in range(NUM_ANSWERS // 200)
    ]
    outputs = engine.generate([{"prompt_token_ids": PROMPT}] * len(params), params, use_tqdm=False)
    answers_NT = np.array([completion.token_ids for output in outputs for completion in output.outputs])
    assert answers_NT.shape == (NUM_ANSWERS, NUM_TOKENS)
    figures = [output.metrics.speculative_decoding for output in outputs]
    assert sum(one["num_accepted_draft_tokens"] for one in figures) > NUM_ANSWERS / 4

    prob_NTV = masked_probabilities(NumpyLlama(model), answers_NT)
    assert (np.take_along_axis(prob_NTV, answers_NT[:, :, None], axis=2) > 0).all(), "a forbidden token was drawn"
    # The first two tokens against every possibility.
    first_V = prob_NTV[0, 0]
    second_VV = masked_probabilities(NumpyLlama(model), np.array([[v, 0] for v in range(V)]))[:, 1]
    pair_VV = first_V[:, None] * np.where(first_V[:, None] > 0, second_VV, 0)
    found_VV = np.bincount(answers_NT[:, 0] * V + answers_NT[:, 1], minlength=V * V).reshape(V, V) / NUM_ANSWERS
    assert 0.5 * np.abs(found_VV - pair_VV).sum() < 1.5 * usual_distance(pair_VV, NUM_ANSWERS)
    # Every token given all before it, summed by position, token before and token.
    before_NTV = np.eye(V)[np.concatenate([np.full((NUM_ANSWERS, 1), PROMPT[-1]), answers_NT[:, :-1]], axis=1)]
    excess_TVV = np.einsum("ntu,ntv->tuv", before_NTV, np.eye(V)[answers_NT] - prob_NTV)
    variance_TVV = np.einsum("ntu,ntv->tuv", before_NTV, prob_NTV * (1 - prob_NTV))
    assert np.abs(excess_TVV).sum() < 1.2 * np.sqrt(2 / np.pi * variance_TVV).sum()
    assert (np.abs(excess_TVV) < 5 * np.sqrt(variance_TVV) + 5).all()


def masked_probabilities(oracle, answers_NT):
    """[N, T, V]: what each token was drawn from; all 0 after a text that is none of the grammar's."""
    distinct, place_N = np.unique(answers_NT, axis=0, return_inverse=True)
    prompts = np.broadcast_to(PROMPT, (len(distinct), len(PROMPT)))
    logits = oracle.logits(np.concatenate([prompts, distinct[:, :-1]], axis=1))[:, len(PROMPT) - 1 :]
    prob = np.zeros(logits.shape)
    for n, answer in enumerate(distinct.tolist()):
        for t in range(len(answer)):
            allowed = sorted(ALTERNATING.allowed(answer[:t], ()))
            if allowed:
                prob[n, t, allowed] = softmax(logits[n, t, allowed])
    return prob[place_N.reshape(-1)]
