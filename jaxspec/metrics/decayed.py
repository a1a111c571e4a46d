"""Host. How often drafts are kept, of late: counts by position that fade, with a prior for what was not seen yet."""

import numpy as np

KEEP_REQUEST = 0.9  # of a request's counts at each round with drafts: it remembers some ten rounds
KEEP_ENGINE = 0.995  # of the engine's, at each round of a row
PRIOR_ROUNDS = 4.0  # what a prior weighs against counted rounds
FIRST_RATE = 0.7  # of an engine that has seen nothing: drafting is tried


class DecayedAcceptance:
    """Of a request, or of all together: how often draft i was kept where all before it were."""

    def __init__(self, num_tokens: int, keep: float):
        """num_tokens: K; keep: the share of the old counts that each new round leaves."""
        self._keep = keep
        self.kept_K = np.zeros(num_tokens, np.float32)
        self.tried_K = np.zeros(num_tokens, np.float32)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count a row's round with drafts: of those kept each, and the first that was not, has been tried."""
        self.kept_K *= self._keep
        self.tried_K *= self._keep
        self.kept_K[:num_accepted] += 1
        self.tried_K[: min(num_drafted, num_accepted + 1)] += 1

    def rates(self) -> np.ndarray:
        """f32[K], with no prior but what a position's predecessor says, and FIRST_RATE for the first."""
        rates_K, before = np.empty_like(self.kept_K), FIRST_RATE
        for position in range(len(rates_K)):
            before = (self.kept_K[position] + PRIOR_ROUNDS * before) / (self.tried_K[position] + PRIOR_ROUNDS)
            rates_K[position] = before
        return rates_K


def survival(rows: list[DecayedAcceptance], prior_K: np.ndarray) -> np.ndarray:
    """f32[B, K]: the chance that a row's draft k and all before it are kept, given rates for what a row has not shown.

    Args:
        rows: at least one.
        prior_K: as `DecayedAcceptance.rates` gives them, of the engine.
    """
    kept_BK = np.stack([row.kept_K for row in rows]) + PRIOR_ROUNDS * prior_K
    tried_BK = np.stack([row.tried_K for row in rows]) + PRIOR_ROUNDS
    return np.cumprod(kept_BK / tried_BK, axis=1).astype(np.float32)
