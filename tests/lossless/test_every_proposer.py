"""Device. T2: whatever guesses and however far, the answers are those of a naive loop without a cache; and the drafters
guess what they should, so that speculation is not lossless merely because everything is rejected."""

import itertools

import numpy as np
import pytest

from jaxspec import SamplingParams
from tests.lossless.again import ask_again
from tests.lossless.engines import MAX_MODEL_LEN, VOCAB_SIZE, custom, draft_model, make_engine, ngram
from tests.lossless.replay import HostReplay, Script, replay_proposer, set_scripts
from tests.oracle.llama import NumpyLlama, assert_says, continuation, row_of
from tests.oracle.suffix import suffix_guess
from tests.quick import heavy_but

CASES = [
    *itertools.product(("ngram", "draft_model", "replay"), range(1, 9)),
    # These share all but a few lines with one of the above.
    *itertools.product(("probabilistic",), (1, 2, 3, 5, 8)),
    *itertools.product(("host_replay",), (1, 2, 4, 8)),
    *itertools.product(("self_draft",), (1, 8)),
    *itertools.product(("self", "ngram+draft_model"), (3,)),
    *itertools.product(("suffix",), (3, 8)),
]
SAMPLED = (
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.05, "top_k": 20, "top_p": 0.95},
)


def make_requests(seed: int):
    """(prompt, params) pairs: prompts around the edges of pages (4) and chunks (16), greedy and sampled in turns, of
    different lengths, one of them to the end of the model's. Three rows run at a time, so requests join and leave."""
    rng = np.random.default_rng(seed)
    requests = []
    for index, length in enumerate((5, 1, 16, 4, 33, 17, 2, 18, 9, 15)):
        piece = rng.integers(0, VOCAB_SIZE, 6)
        piece[0] = index  # a replay drafter knows a prompt by its tokens, even one of a single token
        prompt = np.concatenate([piece, rng.integers(0, VOCAB_SIZE, 3), piece, rng.integers(0, VOCAB_SIZE, 40)])
        params = {"max_tokens": (14, 9, 20)[index % 3] if length != 33 else None, "ignore_eos": True}
        params |= SAMPLED[index % 4] | {"seed": 100 + index} if index % 3 == 1 else {"temperature": 0.0}
        requests.append((prompt[:length].tolist(), SamplingParams(**params)))
    return requests


def answer_of(oracle, prompt, params):
    num_tokens = min(params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - len(prompt))
    return continuation(oracle, prompt, num_tokens, row_of(params))


def copied(token_ids, min_n, max_n, limit):
    """vLLM's n-gram rule, by trying every suffix at every place."""
    n = len(token_ids)
    for size in range(min(max_n, n - 1), min_n - 1, -1):
        for start in range(n - size):
            if token_ids[start : start + size] == token_ids[n - size :]:
                return token_ids[start + size : start + size + limit]
    return []


def histogram_of(num_tokens, prompt, answer, guess):
    """Verify steps by how many drafts they accept, when `guess(committed ids, limit)` drafts in every round."""
    whole, at, histogram = prompt + answer, len(prompt), [0] * (num_tokens + 1)
    while at < len(whole):
        drafts = guess(whole[:at], num_tokens)[: len(whole) - at - 1]
        pairs = zip(drafts, whole[at:], strict=False)
        accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if drafts:
            histogram[accepted] += 1
        at += accepted + 1
    return histogram


QUICK = {("ngram", 8), ("probabilistic", 3), ("host_replay", 2), ("replay", 5)}


@pytest.fixture(scope="module", params=heavy_but(CASES, QUICK.__contains__), ids=lambda case: f"{case[0]}-K{case[1]}")
def case(request, target, drafter, drafter_oracle, target_oracle):
    """(name, K, rule, engine, guess): guess is what the drafter must say, None where it is drawn."""
    name, K = request.param
    rule, proposer = "coupled", None

    def drafted(oracle):
        return lambda ids, limit: continuation(oracle, ids, limit).token_ids

    if name == "ngram":
        config, guess = ngram(K), lambda ids, limit: copied(ids, 1, 3, limit)
    elif name == "draft_model":
        config, guess = draft_model(K, drafter), drafted(drafter_oracle)
    elif name == "self_draft":
        config, guess = draft_model(K, target), drafted(target_oracle)
    elif name == "ngram+draft_model":
        config = draft_model(K, drafter) | {"method": "ngram+model", "prompt_lookup_min": 2, "prompt_lookup_max": 3}
        guess = lambda ids, limit: copied(ids, 2, 3, limit) or drafted(drafter_oracle)(ids, limit)  # noqa: E731
    elif name == "self":
        config = {"method": "self", "num_speculative_tokens": K}  # a third of two layers
        guess = drafted(NumpyLlama(target, num_layers=1))
    elif name == "suffix":  # of its own text alone: what others left behind depends on who ended first
        config = {"method": "suffix", "num_speculative_tokens": K, "suffix_decoding_max_cached_requests": 0}
        guess = suffix_guess
    elif name == "probabilistic":
        rule = ("coupled", "standard")[K % 2]
        config = draft_model(K, drafter, "probabilistic", rejection_sample_method=rule)
        guess = drafted(drafter_oracle)
    else:
        config, guess = custom(K), None
        proposer = HostReplay(K) if name == "host_replay" else replay_proposer(K, MAX_MODEL_LEN)
    # Several rounds on the device before the host looks, for some.
    rounds = 4 if name in ("ngram", "draft_model") and K % 2 == 0 else 1
    engine = make_engine(target, config, proposer=proposer, rounds_per_batch=rounds)
    return name, K, rule, engine, proposer, guess


def test_answers_are_those_of_the_naive_loop(case, target_oracle):
    name, K, rule, engine, proposer, guess = case
    requests = make_requests(seed=K)
    answers = [answer_of(target_oracle, prompt, params) for prompt, params in requests]
    if guess is None:
        rng = np.random.default_rng(K)
        scripts = [
            Script(
                whole := prompt + answer.token_ids,
                wrong={at: (whole[at] + 1) % VOCAB_SIZE for at in np.flatnonzero(rng.random(len(whole)) < 0.2)},
                num_drafts={int(at): int(rng.integers(0, K + 1)) for at in rng.integers(0, MAX_MODEL_LEN, 8)},
            )
            for (prompt, _), answer in zip(requests, answers, strict=True)
        ]
        set_scripts(engine, proposer, scripts)

    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    engine.core.scheduler.audit()
    assert engine.core.scheduler.num_used == 0
    for index, (output, (prompt, params), answer) in enumerate(zip(outputs, requests, answers, strict=True)):
        (completion,) = output.outputs
        assert completion.finish_reason == "length"
        if rule == "standard" and not params.is_greedy:
            assert len(completion.token_ids) == len(answer.token_ids)
            continue
        assert_says(completion.token_ids, answer)
        is_tied = min(answer.leads) < 1e-3
        if is_tied or (name == "probabilistic" and not params.is_greedy):
            continue
        drafts_of = guess or (lambda ids, limit, script=scripts[index]: script.drafts(len(ids), limit))
        wanted = histogram_of(K, prompt, answer.token_ids, drafts_of)
        assert output.metrics.speculative_decoding["acceptance_histogram"] == wanted
    is_certain = [
        min(answer.leads) > 1e-3 and (rule == "coupled" or params.is_greedy)
        for (_, params), answer in zip(requests, answers, strict=True)
    ]
    ask_again(engine, requests, outputs, is_certain)
