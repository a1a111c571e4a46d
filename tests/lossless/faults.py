"""Host. Rejection samplers in numpy, each with one known fault: what a test of losslessness has to notice.

`sampler(prob, None)`, `block(prob, None)` and `greedy(None)` are right. The faults are those found in published
samplers, and those that block verification invites.
"""

import numpy as np

from tests.lossless.markov import NUM_CHAINS, Round, V, inverse


def sampler(prob_of, fault: str | None):
    """A judge that accepts with min(1, p/q), else draws from max(p - q, 0). prob_of: logits -> p, filters and all."""
    rng = np.random.default_rng(77)

    def judge(round: Round) -> np.ndarray:
        ids_BK, counts_B = round.ids_BK, round.counts_B
        B, J, _ = round.logits_BJV.shape
        prob_BJV = prob_of(round.logits_BJV)
        tokens_BJ = np.full((B, J), -1)
        is_open_B = np.ones(B, bool)
        for j in range(J):
            p_BV = prob_BJV[:, j]
            if j < J - 1:
                is_draft_B = j < counts_B
                id_B = np.where(is_draft_B, ids_BK[:, j], 0)
                one_hot_BV = np.eye(V)[id_B]
                q_BV = one_hot_BV if round.draft_logits_BKV is None else np.exp(round.draft_logits_BKV[:, j])
                p_B, q_B = p_BV[np.arange(B), id_B], q_BV[np.arange(B), id_B]
                u_B = round.uniform_BK[:, j] if fault == "draft and accept share a uniform" else rng.random(B)
                ratio_B = p_B if fault == "accepts with p alone" else p_B / np.maximum(q_B, 1e-300)
                is_accepted_B = is_draft_B & (u_B < ratio_B)
                rest_BV = np.maximum(p_BV - q_BV, 0)
                if fault == "residual is the target":
                    rest_BV = p_BV
                if fault == "residual is the target without the draft":
                    rest_BV = p_BV * (1 - one_hot_BV)
                if fault == "residual keeps the draft":
                    rest_BV = rest_BV + one_hot_BV * p_BV
                empty_B1 = rest_BV.sum(axis=1, keepdims=True) == 0
                rest_BV = np.where(empty_B1, p_BV, rest_BV)
                redraw_B = rng.random(B)
                if fault == "accept and resample share a uniform":
                    redraw_B = u_B
                recovered_B = inverse(rest_BV, redraw_B)
            else:
                is_draft_B = is_accepted_B = np.zeros(B, bool)
                id_B = recovered_B = np.zeros(B, int)
            bonus_from_BV = prob_BJV[:, max(j - 1, 0)] if fault == "bonus from the row before" else p_BV
            bonus_B = inverse(bonus_from_BV, rng.random(B))
            token_B = np.where(is_draft_B, np.where(is_accepted_B, id_B, recovered_B), bonus_B)
            tokens_BJ[:, j] = np.where(is_open_B, token_B, -1)
            is_open_B &= is_accepted_B
        return tokens_BJ

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
        token_B = inverse(weight_BV, redraw_B)
        place_1J = np.arange(K + 1)[None]
        kept_BJ = np.where(place_1J < tau_B[:, None], np.pad(ids_BK, ((0, 0), (0, 1))), -1)
        return np.where(place_1J == tau_B[:, None], token_B[:, None], kept_BJ)

    return judge


def greedy(fault: str | None):
    """A judge that emits the arg-max while it equals the draft."""

    def judge(round: Round) -> np.ndarray:
        logits_BJV, ids_BK, counts_B = round.logits_BJV, round.ids_BK, round.counts_B
        B, J, _ = logits_BJV.shape
        best_BJ = (-logits_BJV if fault == "divides by a temperature of -1" else logits_BJV).argmax(axis=2)
        tokens_BJ = np.full((B, J), -1)
        is_open_B = np.ones(B, bool)
        for j in range(J):
            is_draft_B = j < counts_B if j < J - 1 else np.zeros(B, bool)
            draft_B = ids_BK[:, min(j, J - 2)]
            judged_by = min(j + 1, J - 1) if fault == "judges a draft by the row after" else j
            is_accepted_B = is_draft_B & (best_BJ[:, judged_by] == draft_B)
            token_B = best_BJ[:, j]
            if fault == "emits the rejected draft":
                token_B = np.where(is_draft_B, draft_B, token_B)
            if fault == "bonus always from row K":
                token_B = np.where(is_draft_B, token_B, best_BJ[:, -1])
            tokens_BJ[:, j] = np.where(is_open_B, token_B, -1)
            is_open_B &= is_draft_B if fault == "goes on after a rejection" else is_accepted_B
        return tokens_BJ

    return judge
