"""Host. When acceptance is too low or too high, and when another reading of a drafter's files is clearly better."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import bdtrc

from jaxspec.config.methods import METHODS, drafter_of
from jaxspec.engine.probe import LEAST_STEPS, is_useless
from jaxspec.metrics.acceptance import AcceptanceStats

Verdict = Literal["unknown", "useless", "low", "plausible", "suspiciously high"]

# How often the first draft of a round is kept, greedily, on short chat and code: published figures, taken wide. Below
# the first number something is usually wrong; at the second or above in every position the drafter may be the target.
PLAUSIBLE = {
    "eagle": (0.4, 0.97),
    "eagle3": (0.5, 0.98),
    "p_eagle": (0.5, 0.98),
    "mtp": (0.5, 0.98),
    "medusa": (0.3, 0.95),
    "mlp_speculator": (0.3, 0.95),
    "dflash": (0.5, 0.98),
    "dspark": (0.5, 0.98),
    "draft_model": (0.3, 0.98),
    "pard": (0.3, 0.98),
}

# A suspect is named when at least so many more drafts are kept a round, and a sign test leaves chance no more than
# this, all suspects of a run together.
LEAST_GAIN = 0.1
ALPHA = 1e-3
CONTEXT = 3  # committed tokens that make two positions the same, with the token after them


def plausible_range(method: str) -> tuple[float, float] | None:
    """Of the first draft's acceptance; None for methods whose drafts depend on the text alone, or are untrained."""
    return PLAUSIBLE.get(drafter_of(method))


def verdict_of(method: str, stats: AcceptanceStats) -> Verdict:
    """What the acceptance of a few greedy answers says of a drafter."""
    if stats.num_drafts < LEAST_STEPS:
        return "unknown"
    if is_useless(stats):
        return "useless"
    bounds = plausible_range(method)
    if bounds is None:
        return "plausible"
    rates = stats.acceptance_per_position
    if rates[0] < bounds[0]:
        return "low"
    return "suspiciously high" if min(rates) >= bounds[1] else "plausible"


def explanation(method: str, verdict: Verdict) -> str:
    """The verdict for people."""
    if verdict == "unknown":
        return f"fewer than {LEAST_STEPS} rounds had drafts: too few to judge; give more prompts or longer answers"
    if verdict == "useless":
        return "hardly a draft is kept: drafting slows answers down"
    bounds = plausible_range(method)
    if verdict == "low" and bounds is not None:
        return f"lower than drafters of this kind reach; from {bounds[0]:.2f} on would be usual"
    if verdict == "suspiciously high" and METHODS[method].needs == "model":
        return "nearly everything is kept: the draft may be the target itself, and then it costs what it saves"
    if verdict == "suspiciously high":
        return "nearly everything is kept, as no trained head does on varied text: the answers may repeat themselves"
    return (
        "as is usual for this kind"
        if bounds is not None
        else "no rate is usual for this method: nothing was trained for the target"
    )


@dataclass(frozen=True)
class Comparison:
    """One reading of a drafter's files beside the one that was loaded, at the same positions of the same answers.

    gain: drafts more a round, on average; num_better, num_worse: positions of different context where more, or fewer,
    drafts are kept; p_value: that chance alone gives so many better ones.
    """

    gain: float
    num_better: int
    num_worse: int
    p_value: float

    def is_clear(self, num_suspects: int) -> bool:
        """Whether the other reading is to be named, one of so many that were tried."""
        return self.gain >= LEAST_GAIN and self.p_value * num_suspects < ALPHA


def compare(kept: np.ndarray, other: np.ndarray, contexts: Sequence[tuple[int, ...]]) -> Comparison:
    """Drafts kept at each position as loaded and in another reading. A context counts once, since texts repeat."""
    first = {context: place for place, context in reversed(list(enumerate(contexts)))}
    difference = (other - kept)[sorted(first.values())]
    num_better, num_worse = int((difference > 0).sum()), int((difference < 0).sum())
    # P[X >= num_better] of a fair coin thrown for every position that differs.
    p_value = float(bdtrc(num_better - 1, num_better + num_worse, 0.5)) if num_better else 1.0
    return Comparison(float(difference.mean()) if len(difference) else 0.0, num_better, num_worse, p_value)
