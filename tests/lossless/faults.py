"""Host. Rejection samplers in numpy, each with one known fault: what a test of losslessness has to notice.

`sampler(prob, None)` and `greedy(None)` are right. The faults are those found in published samplers.
"""

import numpy as np

from tests.lossless.markov import Round, V, inverse


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
