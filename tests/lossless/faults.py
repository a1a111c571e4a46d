"""Host and device. Rejection samplers with one known fault each: what a test of losslessness has to notice.

A fault of None is right. The faults are those found in published samplers, and those that block verification invites.
`accept_or_recover` and `emit_while_equal` are written over numpy or jax.numpy, the first argument, so that the same
faults judge the numpy rounds of markov.py, by the functions below them, and compiled ones.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.lossless.markov import NUM_CHAINS, Round, V

SAMPLED_FAULTS = (
    "draft and accept share a uniform",
    "accept and resample share a uniform",
    "residual is the target",
    "residual is the target without the draft",
    "residual keeps the draft",
    "accepts with p alone",
    "bonus from the row before",
)
GREEDY_FAULTS = (
    "emits the rejected draft",
    "goes on after a rejection",
    "bonus always from row K",
    "judges a draft by the row after",
    "divides by a temperature of -1",
)


class Uniforms(NamedTuple):
    """What a round draws with, by place; draft: what its drafts were drawn with."""

    accept: Sequence[Any]  # K of u_B, as the others but bonus, of which there are J
    recover: Sequence[Any]
    bonus: Sequence[Any]
    draft: Sequence[Any]


def accept_or_recover(xp, fault: str | None, prob_BJV, prob_draft_BKV, ids_BK, counts_B, uniforms: Uniforms):
    """(tokens_BJ, num_accepted_B): accepts with min(1, p/q), else draws from max(p - q, 0). No q: a point mass."""
    B, J, V = prob_BJV.shape
    tokens, accepted = [], []
    for j in range(J):
        p_BV = prob_BJV[:, j]
        bonus_from_BV = prob_BJV[:, max(j - 1, 0)] if fault == "bonus from the row before" else p_BV
        token_B = inverse(xp, bonus_from_BV, uniforms.bonus[j])
        is_accepted_B = xp.zeros(B, bool)
        if j < J - 1:
            is_draft_B = j < counts_B
            id_B = xp.where(is_draft_B, ids_BK[:, j], 0)
            one_hot_BV = xp.eye(V, dtype=p_BV.dtype)[id_B]
            q_BV = one_hot_BV if prob_draft_BKV is None else prob_draft_BKV[:, j]
            p_B, q_B = xp.sum(p_BV * one_hot_BV, axis=1), xp.sum(q_BV * one_hot_BV, axis=1)
            u_B = (uniforms.draft if fault == "draft and accept share a uniform" else uniforms.accept)[j]
            ratio_B = p_B if fault == "accepts with p alone" else p_B / xp.maximum(q_B, 1e-30)
            is_accepted_B = is_draft_B & (u_B < ratio_B)
            rest_BV = xp.maximum(p_BV - q_BV, 0)
            if fault == "residual is the target":
                rest_BV = p_BV
            if fault == "residual is the target without the draft":
                rest_BV = p_BV * (1 - one_hot_BV)
            if fault == "residual keeps the draft":
                rest_BV = rest_BV + one_hot_BV * p_BV
            rest_BV = xp.where(xp.sum(rest_BV, axis=1, keepdims=True) == 0, p_BV, rest_BV)
            redraw_B = u_B if fault == "accept and resample share a uniform" else uniforms.recover[j]
            judged_B = xp.where(is_accepted_B, id_B, inverse(xp, rest_BV, redraw_B))
            token_B = xp.where(is_draft_B, judged_B, token_B)
        tokens.append(token_B)
        accepted.append(is_accepted_B)
    return _verdict(xp, tokens, accepted)


def emit_while_equal(xp, fault: str | None, logits_BJV, ids_BK, counts_B):
    """(tokens_BJ, num_accepted_B): emits the arg-max while it equals the draft."""
    B, J, _ = logits_BJV.shape
    best_BJ = xp.argmax(-logits_BJV if fault == "divides by a temperature of -1" else logits_BJV, axis=2)
    tokens, accepted = [], []
    for j in range(J):
        token_B, is_accepted_B = best_BJ[:, j], xp.zeros(B, bool)
        if j < J - 1:
            is_draft_B, draft_B = j < counts_B, ids_BK[:, j]
            judged_by = min(j + 1, J - 1) if fault == "judges a draft by the row after" else j
            is_accepted_B = is_draft_B & (best_BJ[:, judged_by] == draft_B)
            if fault == "goes on after a rejection":
                is_accepted_B = is_draft_B
            if fault == "emits the rejected draft":
                token_B = xp.where(is_draft_B, draft_B, token_B)
            if fault == "bonus always from row K":
                token_B = xp.where(is_draft_B, token_B, best_BJ[:, -1])
            if fault == "judges a draft by the row after":
                token_B = xp.where(is_accepted_B, draft_B, token_B)
        tokens.append(token_B)
        accepted.append(is_accepted_B)
    return _verdict(xp, tokens, accepted)


def inverse(xp, weight_BV, uniform_B):
    """The token at which the cumulative weight passes the uniform."""
    cumulative_BV = xp.cumsum(weight_BV, axis=1)
    ids_B = xp.sum((cumulative_BV <= (uniform_B * cumulative_BV[:, -1])[:, None]).astype(xp.int32), axis=1)
    return xp.minimum(ids_B, weight_BV.shape[1] - 1)


def _verdict(xp, tokens, accepted):
    """From each position's token and whether a draft was accepted there."""
    tokens_BJ, accepted_BJ = xp.stack(tokens, axis=1), xp.stack(accepted, axis=1)
    num_accepted_B = xp.sum(xp.cumprod(accepted_BJ.astype(xp.int32), axis=1), axis=1)
    is_said_BJ = xp.arange(tokens_BJ.shape[1])[None] <= num_accepted_B[:, None]
    return xp.where(is_said_BJ, tokens_BJ, -1), num_accepted_B


def sampler(prob_of, fault: str | None):
    """A judge of rounds. prob_of: logits -> p, filters and all."""
    rng = np.random.default_rng(77)

    def judge(round: Round) -> np.ndarray:
        B, J, _ = round.logits_BJV.shape
        uniforms = Uniforms(*(rng.random((size, B)) for size in (J - 1, J - 1, J)), round.uniform_BK.T)
        q_BKV = None if round.draft_logits_BKV is None else np.exp(round.draft_logits_BKV)
        prob_BJV = prob_of(round.logits_BJV)
        return accept_or_recover(np, fault, prob_BJV, q_BKV, round.ids_BK, round.counts_B, uniforms)[0]

    return judge


def block(prob_of, fault: str | None):
    """A judge that keeps the longest prefix of drafts that stands (behaviours.md 2.5). prob_of: logits -> p."""
    rng = np.random.default_rng(78)
    by_position = np.random.default_rng(79).random((2, NUM_CHAINS, 64))

    def judge(round: Round) -> np.ndarray:
        ids_BK, counts_B = round.ids_BK, round.counts_B
        B, K = ids_BK.shape
        rows, places = np.arange(B), np.arange(K)
        prob_BJV = prob_of(round.logits_BJV)
        id_BK = np.maximum(ids_BK, 0)
        q_BKV = np.eye(V)[id_BK] if round.draft_logits_BKV is None else np.exp(round.draft_logits_BKV)
        joint_BJ = np.ones((B, K + 1))
        for k in range(K):
            ratio_B = prob_BJV[rows, k, id_BK[:, k]] / np.maximum(q_BKV[rows, k, id_BK[:, k]], 1e-300)
            joint_BJ[:, k + 1] = np.minimum(joint_BJ[:, k] * ratio_B, 1)
        scale_BK1 = np.ones((B, K, 1)) if fault == "forgets the scale" else joint_BJ[:, :K, None]
        excess_BKV = np.maximum(scale_BK1 * prob_BJV[:, :K] - q_BKV, 0)
        mass_BK = excess_BKV.sum(axis=2)
        h_BK = joint_BJ[:, 1:].copy()
        if fault != "stands with its ratio alone":
            total_BK = mass_BK[:, 1:] + 1 - joint_BJ[:, 1:K]
            inner_BK = np.where(total_BK > 0, mass_BK[:, 1:] / np.where(total_BK > 0, total_BK, 1), 1)
            h_BK[:, :-1] = np.where(places[1:] < counts_B[:, None], inner_BK, h_BK[:, :-1])
        u_BK = rng.random((B, K))
        if fault == "one uniform for all places":
            u_BK = u_BK[:, :1]
        if fault == "draws keyed by position":
            u_BK = by_position[0][round.chain_B[:, None], round.len_B[:, None] + places]
        stands_BK = (u_BK <= h_BK) & (places < counts_B[:, None])
        tau_B = np.where(stands_BK, places + 1, 0).max(axis=1)
        if fault == "keeps the shortest that stands":
            tau_B = np.where(stands_BK.any(axis=1), stands_BK.argmax(axis=1) + 1, 0)
        if fault == "stops at the first that does not":
            tau_B = np.cumprod(stands_BK, axis=1).sum(axis=1)
        cut_B = np.minimum(tau_B, K - 1)
        rest_BV = excess_BKV[rows, cut_B]
        if fault == "draws from the unscaled excess":
            rest_BV = np.maximum(prob_BJV[rows, cut_B] - q_BKV[rows, cut_B], 0)
        is_whole_B = (tau_B == counts_B) | (rest_BV.sum(axis=1) == 0)
        weight_BV = np.where(is_whole_B[:, None], prob_BJV[rows, tau_B], rest_BV)
        redraw_B = rng.random(B)
        if fault == "draws keyed by position":
            redraw_B = by_position[1][round.chain_B, round.len_B + tau_B]
        token_B = inverse(np, weight_BV, redraw_B)
        place_1J = np.arange(K + 1)[None]
        kept_BJ = np.where(place_1J < tau_B[:, None], np.pad(ids_BK, ((0, 0), (0, 1))), -1)
        return np.where(place_1J == tau_B[:, None], token_B[:, None], kept_BJ)

    return judge


def greedy(fault: str | None):
    """A judge of rounds."""
    return lambda round: emit_while_equal(np, fault, round.logits_BJV, round.ids_BK, round.counts_B)[0]
