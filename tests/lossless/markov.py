"""Host. A vocabulary of eight and two Markov tables: target and drafter whose every distribution is known.

A judge is any function Round -> tokens_BJ; jaxspec's own and those of `faults.py` are run and measured by one code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

V, K = 8, 3
NUM_CHAINS = 200_000
PROMPT_LEN = 12
FIRST = 0  # every prompt ends in this token
LIMIT = 0.015  # total variation; a right sampler of this many chains stays below half of it


@dataclass(frozen=True)
class Round:
    """What a judge is given: B chains, their drafts, and the target's logits after each."""

    logits_BJV: np.ndarray
    ids_BK: np.ndarray  # -1 past the count
    counts_B: np.ndarray
    draft_logits_BKV: np.ndarray | None
    uniform_BK: np.ndarray  # what the drafts were drawn with
    len_B: np.ndarray  # tokens committed so far
    chain_B: np.ndarray  # which chain each row is
    history_BC: np.ndarray  # its tokens, the prompt's PROMPT_LEN first


Judge = Callable[[Round], np.ndarray]


def random_table(seed: int, spread: float = 1.3) -> np.ndarray:
    weights = np.exp(np.random.default_rng(seed).normal(size=(V, V)) * spread)
    return weights / weights.sum(axis=1, keepdims=True)


def normalised(weights_VV: np.ndarray) -> np.ndarray:
    return weights_VV / weights_VV.sum(axis=1, keepdims=True)


TARGET = random_table(1)
OTHER = random_table(2)
EVEN = np.arange(V) % 2 == 0
HALF = normalised(np.where(EVEN[None], TARGET, 0))  # a target without odd tokens


@dataclass(frozen=True)
class Drafter:
    """target, draft: transition tables; kind: "sampled" from draft, its "argmax", or "ngram" over the row's history."""

    target_VV: np.ndarray
    draft_VV: np.ndarray
    kind: str = "sampled"


DRAFTERS = {
    "sampled": Drafter(TARGET, OTHER),
    "argmax": Drafter(TARGET, OTHER, "argmax"),
    "ngram": Drafter(TARGET, OTHER, "ngram"),
    "equal": Drafter(TARGET, TARGET),
    "disjoint": Drafter(HALF, normalised(np.where(EVEN[None], 0, OTHER))),
    "holes": Drafter(TARGET, normalised(np.where(np.arange(V)[None] < 5, OTHER, 0))),
}


def draft(drafter: Drafter, history_BC, len_B, rng) -> tuple:
    """(ids_BK, counts_B, draft_logits_BKV | None, uniform_BK): the uniforms are those the drafts were drawn with."""
    B = len(len_B)
    uniform_BK = rng.random((B, K))
    if drafter.kind == "ngram":
        return *lookup(history_BC, len_B), None, uniform_BK
    last_B = history_BC[np.arange(B), len_B - 1]
    ids_BK, logits = np.zeros((B, K), np.int64), []
    with np.errstate(divide="ignore"):
        logits_VV = np.log(drafter.draft_VV)
    for k in range(K):
        prob_BV = drafter.draft_VV[last_B]
        logits.append(logits_VV[last_B])
        if drafter.kind == "argmax":
            last_B = prob_BV.argmax(axis=1)
        else:
            last_B = inverse(prob_BV, uniform_BK[:, k])
        ids_BK[:, k] = last_B
    return ids_BK, np.full(B, K), None if drafter.kind == "argmax" else np.stack(logits, axis=1), uniform_BK


def inverse(prob_BV, uniform_B) -> np.ndarray:
    """The token at which the cumulative probability passes the uniform."""
    cumulative_BV = np.cumsum(prob_BV, axis=1)
    return (cumulative_BV <= (uniform_B * cumulative_BV[:, -1])[:, None]).sum(axis=1).clip(0, V - 1)


def lookup(history_BC, len_B) -> tuple[np.ndarray, np.ndarray]:
    """What followed the earliest occurrence of the last token before it, ragged; no drafts where there is none."""
    B, C = history_BC.shape
    column = np.arange(C)[None]
    last_B1 = history_BC[np.arange(B), len_B - 1][:, None]
    is_match_BC = (history_BC == last_B1) & (column < (len_B - 1)[:, None])
    start_B = is_match_BC.argmax(axis=1) + 1
    counts_B = np.where(is_match_BC.any(axis=1), np.minimum(len_B - start_B, K), 0)
    ids_BK = np.take_along_axis(history_BC, np.minimum(start_B[:, None] + np.arange(K)[None], C - 1), axis=1)
    return np.where(np.arange(K)[None] < counts_B[:, None], ids_BK, -1), counts_B


def run_chains(
    drafter: Drafter,
    judge: Judge,
    seed: int = 0,
    num_chains: int = NUM_CHAINS,
    num_new: int = K + 1,
    prompt: tuple[int, ...] | None = None,
):
    """The first `num_new` tokens of every chain, from as many rounds as that takes; prompts differ if none is given."""
    rng = np.random.default_rng(seed)
    history_BC = np.full((num_chains, PROMPT_LEN + num_new + K + 1), -1)
    history_BC[:, : PROMPT_LEN - 1] = rng.integers(0, V, (num_chains, PROMPT_LEN - 1))
    history_BC[:, PROMPT_LEN - 1] = FIRST
    if prompt is not None:
        history_BC[:, :PROMPT_LEN] = prompt
    length = np.full(num_chains, PROMPT_LEN)
    with np.errstate(divide="ignore"):
        logits_VV = np.log(drafter.target_VV)
    while (chain_B := np.flatnonzero(length < PROMPT_LEN + num_new)).size:
        len_B = length[chain_B]
        ids_BK, counts_B, draft_logits_BKV, uniform_BK = draft(drafter, history_BC[chain_B], len_B, rng)
        last_B1 = history_BC[chain_B, len_B - 1][:, None]
        fed_BJ = np.concatenate([last_B1, np.maximum(ids_BK, 0)], axis=1)
        history = history_BC[chain_B]
        tokens_BJ = judge(
            Round(logits_VV[fed_BJ], ids_BK, counts_B, draft_logits_BKV, uniform_BK, len_B, chain_B, history)
        )
        for j in range(K + 1):
            is_token_B = tokens_BJ[:, j] >= 0
            history_BC[chain_B[is_token_B], (len_B + j)[is_token_B]] = tokens_BJ[is_token_B, j]
        length[chain_B] += (tokens_BJ >= 0).sum(axis=1)
    return history_BC[:, PROMPT_LEN : PROMPT_LEN + num_new]


def distances(tokens_BN: np.ndarray, prob_VV: np.ndarray) -> dict[str, float]:
    """Total variation of (a) the first token, (b) the first two, (c) the last given the one before it."""
    first = np.bincount(tokens_BN[:, 0], minlength=V) / len(tokens_BN)
    pair = np.bincount(tokens_BN[:, 0] * V + tokens_BN[:, 1], minlength=V * V).reshape(V, V) / len(tokens_BN)
    last = np.bincount(tokens_BN[:, -2] * V + tokens_BN[:, -1], minlength=V * V).reshape(V, V) / len(tokens_BN)
    return {
        "first": 0.5 * np.abs(first - prob_VV[FIRST]).sum(),
        "first_two": 0.5 * np.abs(pair - prob_VV[FIRST][:, None] * prob_VV).sum(),
        "last": 0.5 * np.abs(last - last.sum(axis=1, keepdims=True) * prob_VV).sum(),
    }
