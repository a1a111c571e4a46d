"""Host. Whether tokens that came are draws from the distributions they should have, each from a different one.

Every token is turned into a number that is uniform on (0, 1) whatever its distribution is (a randomised probability
integral transform), so tokens of all positions and prompts can be counted together. Which token comes first in the
transform decides what is noticed: the likelier first, those of higher ids (samplers that walk the vocabulary), or those
the drafter likes more than the target. One more count compares how often the target's k-th token came with how often it
should have.

A token's distribution is given by what precedes it, and so must be the group it is counted in: which place of the round
it has and whether a rejection went before are known by then; whether it is an accepted draft is not.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import chdtrc, chdtri

ALPHA = 1e-3  # how often a right engine is called faulty, all tests of a run together
NUM_BINS = 10
NUM_RANKS = 32  # the likeliest tokens, counted one by one; the rest together
PAIR_BINS = 4
LEAST_EXPECTED = 5.0  # tokens a cell must expect for the chi-square law to hold
CHUNK_CELLS = 4 * 2**20  # probabilities looked at in one go
LEAST_TOKENS = 50  # a group with fewer is not tested


def g_test(observed: np.ndarray, expected: np.ndarray) -> tuple[float, int, float]:
    """(G, degrees of freedom, p-value) of the likelihood-ratio test; both have one sum.

    Cells from the end are joined until each expects LEAST_EXPECTED. Source: Sokal & Rohlf, Biometry, "G-test".
    """
    cells: list[list[float]] = []
    for seen, wanted in zip(observed, expected, strict=True):
        if cells and cells[-1][1] < LEAST_EXPECTED:
            cells[-1][0] += seen
            cells[-1][1] += wanted
        else:
            cells.append([seen, wanted])
    if len(cells) > 1 and cells[-1][1] < LEAST_EXPECTED:
        seen, wanted = cells.pop()
        cells[-1][0] += seen
        cells[-1][1] += wanted
    seen_X, wanted_X = np.array(cells).T
    ratio_X = np.where(seen_X > 0, seen_X, 1) / wanted_X
    statistic = max(0.0, float(2 * np.sum(seen_X * np.log(ratio_X))))
    freedom = len(cells) - 1
    return statistic, freedom, float(chdtrc(freedom, statistic)) if freedom else 1.0


def transform(prob_NV: np.ndarray, order_NV: np.ndarray, token_ids_N: np.ndarray, uniform_N: np.ndarray) -> np.ndarray:
    """Numbers that are uniform if each token was drawn from its row of prob: those of higher order come first."""
    own_N1 = np.take_along_axis(order_NV, token_ids_N[:, None], axis=1)
    before_N = np.where(order_NV > own_N1, prob_NV, 0).sum(axis=1)
    at_N = np.where(order_NV == own_N1, prob_NV, 0).sum(axis=1)
    return (before_N + uniform_N * at_N).clip(0, 1)


@dataclass
class _Group:
    """Counts of one kind of place."""

    num_tokens: int = 0
    by_probability: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS))
    by_token: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS))
    by_draft: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS))
    ranks_seen: np.ndarray = field(default_factory=lambda: np.zeros(NUM_RANKS + 1))
    ranks_expected: np.ndarray = field(default_factory=lambda: np.zeros(NUM_RANKS + 1))


_Token = tuple[np.ndarray, int, np.ndarray | None, tuple[int, int]]  # as `add` is given it


class DistributionTest:
    """Takes tokens one by one, counts them many at a time, and judges them at the end."""

    def __init__(self, seed: int):
        """seed: of the random numbers that the transforms need."""
        self._rng = np.random.default_rng(seed)
        self._groups: dict[str, _Group] = defaultdict(_Group)
        self._waiting: dict[tuple[str, bool], list[_Token]] = defaultdict(list)  # by group, and whether drafted
        self._transforms: dict[tuple[int, int], float] = {}
        self._tails: dict[tuple[int, int], float] = {}

    def add(
        self, group: str, prob_V: np.ndarray, token_id: int, draft_prob_V: np.ndarray | None, place: tuple[int, int]
    ) -> None:
        """Take a token.

        Args:
            group: what it is counted with.
            prob_V: f64, what it was to be drawn from.
            draft_prob_V: what the draft in its place was drawn from, one-hot for a point mass; None without a draft.
            place: which answer it is of, and where in it.
        """
        kind = (group, draft_prob_V is not None)
        # A copy, since a row would keep the whole array it is of.
        self._waiting[kind].append((prob_V.copy(), token_id, draft_prob_V, place))
        if len(self._waiting[kind]) * prob_V.size > CHUNK_CELLS:
            self._count(kind)

    def _count(self, kind: tuple[str, bool]) -> None:
        waiting, counts = self._waiting.pop(kind), self._groups[kind[0]]
        prob_NV = np.stack([prob_V for prob_V, *_ in waiting])
        token_ids_N = np.array([token_id for _, token_id, _, _ in waiting])
        num_tokens, vocab_size = prob_NV.shape

        u_N = transform(prob_NV, prob_NV, token_ids_N, self._rng.random(num_tokens))
        counts.by_probability += np.histogram(u_N, NUM_BINS, (0, 1))[0]
        ids_NV = np.broadcast_to(np.arange(vocab_size), prob_NV.shape)
        by_token_N = transform(prob_NV, ids_NV, token_ids_N, self._rng.random(num_tokens))
        counts.by_token += np.histogram(by_token_N, NUM_BINS, (0, 1))[0]
        if kind[1]:
            draft_prob_NV = np.stack([draft_prob_V for _, _, draft_prob_V, _ in waiting if draft_prob_V is not None])
            ratio_NV = np.divide(draft_prob_NV, prob_NV, out=np.full_like(prob_NV, -1), where=prob_NV > 0)
            by_draft_N = transform(prob_NV, ratio_NV, token_ids_N, self._rng.random(num_tokens))
            counts.by_draft += np.histogram(by_draft_N, NUM_BINS, (0, 1))[0]

        own_N1 = np.take_along_axis(prob_NV, token_ids_N[:, None], axis=1)
        is_equal_before_NV = (prob_NV == own_N1) & (ids_NV < token_ids_N[:, None])
        rank_N = ((prob_NV > own_N1) | is_equal_before_NV).sum(axis=1)
        counts.ranks_seen += np.bincount(np.minimum(rank_N, NUM_RANKS), minlength=NUM_RANKS + 1)
        num_ranks = min(NUM_RANKS, vocab_size)
        top_NR = -np.sort(np.partition(-prob_NV, num_ranks - 1, axis=1)[:, :num_ranks], axis=1)
        counts.ranks_expected[:num_ranks] += top_NR.sum(axis=0)
        counts.ranks_expected[NUM_RANKS] += max(0.0, num_tokens - top_NR.sum())

        # A token of no probability at all is for the caller to judge.
        tail_N = np.where(own_N1[:, 0] > 0, np.where(prob_NV <= own_N1, prob_NV, 0).sum(axis=1), 1.0)
        for (*_, place), u, tail in zip(waiting, u_N.tolist(), tail_N.tolist(), strict=True):
            self._transforms[place], self._tails[place] = u, tail

    def results(self) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
        """One entry a test, and the places of tokens that a right engine hardly ever says.

        An entry has its group, G, df, p and whether it failed at the corrected threshold; `detects` is about the total
        variation that as many tokens would have shown.
        """
        for kind in list(self._waiting):
            self._count(kind)
        found = []
        for group, counts in sorted(self._groups.items()):
            found.append(_result(group, "by_probability", counts.by_probability, None))
            found.append(_result(group, "by_rank", counts.ranks_seen, counts.ranks_expected))
            found.append(_result(group, "by_token", counts.by_token, None))
            if counts.by_draft.any():
                found.append(_result(group, "by_draft", counts.by_draft, None))
        found.append(_result("neighbours", "by_probability", self._pairs(), None))
        tested = [one for one in found if one["tested"]]
        threshold = ALPHA / (len(tested) + 1)  # Bonferroni; one more for the improbable tokens
        for one in tested:
            one["failed"] = one["p"] < threshold
            excess = max(float(chdtri(one["df"], threshold)) - one["df"], 1.0)
            one["detects"] = float(np.sqrt(excess / (4 * one["tokens"])))
        least = threshold / max(len(self._tails), 1)
        return found, [place for place, tail in self._tails.items() if tail < least]

    def _pairs(self) -> np.ndarray:
        """How often each cell of a square was hit by a token's transform and the next one's; no token is used twice."""
        cells = np.zeros((PAIR_BINS, PAIR_BINS))
        for (answer, place), u in self._transforms.items():
            after = self._transforms.get((answer, place + 1))
            if place % 2 == 0 and after is not None:
                cells[_bin(u), _bin(after)] += 1
        return cells.ravel()


def _bin(u: float) -> int:
    return min(int(u * PAIR_BINS), PAIR_BINS - 1)


def _result(group: str, name: str, seen: np.ndarray, expected: np.ndarray | None) -> dict[str, Any]:
    num_tokens = int(seen.sum())
    result = {"group": group, "test": name, "tokens": num_tokens, "tested": num_tokens >= LEAST_TOKENS, "failed": False}
    if not result["tested"]:
        return result
    expected = np.full(seen.shape, num_tokens / seen.size) if expected is None else expected
    statistic, freedom, p = g_test(seen, expected)
    if freedom == 0:
        return result | {"tested": False}
    return result | {
        "G": statistic, "df": freedom, "p": p, "observed": seen.astype(int).tolist(),
        "expected": np.round(expected, 2).tolist(),
    }  # fmt: skip
