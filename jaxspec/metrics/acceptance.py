"""Host. How many drafts were kept: the one definition that requests, the engine, the server and the bench all report.

A verify step is a row-round with at least one draft. Accepted counts what the verdict kept, before stop ids or caps
cut the block; output tokens count what was committed after the cut. So a finished request may have accepted drafts
that are not in its text, and `tokens_per_round`, which predicts speed, counts only text.
"""

from collections.abc import Mapping
from typing import Any


class AcceptanceStats:
    """Counts of one request, or of many together. All derived figures are 0.0 while there is nothing to divide by."""

    def __init__(self, num_spec_tokens: int):
        """num_spec_tokens: drafts a row may have in a round (0 without speculation)."""
        self.num_spec_tokens = num_spec_tokens
        self.num_rounds = 0  # row-rounds, with or without drafts
        self.num_output_tokens = 0
        self.num_draft_tokens = 0
        self.histogram = [0] * (num_spec_tokens + 1)  # verify steps by how many drafts they accepted

    def observe(self, num_drafted: int, num_accepted: int, num_committed: int) -> None:
        """Count one row-round."""
        if not 0 <= num_accepted <= num_drafted <= self.num_spec_tokens:
            raise ValueError(f"{num_accepted=} <= {num_drafted=} <= {self.num_spec_tokens=} must hold in every round")
        self.num_rounds += 1
        self.num_output_tokens += num_committed
        self.num_draft_tokens += num_drafted
        if num_drafted:
            self.histogram[num_accepted] += 1

    def merge(self, other: "AcceptanceStats") -> None:
        """Add another's counts to these; a longer histogram makes this one longer."""
        self.num_spec_tokens = max(self.num_spec_tokens, other.num_spec_tokens)
        self.histogram += [0] * (self.num_spec_tokens + 1 - len(self.histogram))
        for num_accepted, num_steps in enumerate(other.histogram):
            self.histogram[num_accepted] += num_steps
        self.num_rounds += other.num_rounds
        self.num_output_tokens += other.num_output_tokens
        self.num_draft_tokens += other.num_draft_tokens

    @property
    def num_drafts(self) -> int:
        """Verify steps: row-rounds with at least one draft."""
        return sum(self.histogram)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that the target kept."""
        return sum(num_accepted * num_steps for num_accepted, num_steps in enumerate(self.histogram))

    @property
    def num_accepted_per_position(self) -> list[int]:
        """For each draft position, the verify steps that accepted it: those that accepted more than its index."""
        return [sum(self.histogram[position + 1 :]) for position in range(self.num_spec_tokens)]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a verify step gives, its recovered or bonus token included: 1 + accepted / verify steps."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def acceptance_per_position(self) -> list[float]:
        """Accepted at a position / all verify steps, also those that drafted less far."""
        return [_ratio(num_accepted, self.num_drafts) for num_accepted in self.num_accepted_per_position]

    @property
    def tokens_per_round(self) -> float:
        """Output tokens / all row-rounds."""
        return _ratio(self.num_output_tokens, self.num_rounds)

    def as_dict(self) -> dict[str, Any]:
        """What a response carries as `metrics.speculative_decoding`; `from_dict` reads it back."""
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": list(self.histogram),
            "num_spec_steps": self.num_drafts,
            "num_accepted_draft_tokens": self.num_accepted_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.num_spec_tokens,
            "num_rounds": self.num_rounds,
            "num_output_tokens": self.num_output_tokens,
            "tokens_per_round": self.tokens_per_round,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "AcceptanceStats":
        """The counts that `as_dict` wrote."""
        stats = cls(data["num_spec_tokens"])
        stats.histogram = list(data["acceptance_histogram"])
        stats.num_draft_tokens = data["num_draft_tokens"]
        stats.num_rounds = data["num_rounds"]
        stats.num_output_tokens = data["num_output_tokens"]
        return stats


def log_line(now: AcceptanceStats, before: AcceptanceStats, seconds: float) -> str:
    """One line for the log about the `seconds` between two readings, worded as vLLM's since scripts parse that."""
    window = AcceptanceStats(now.num_spec_tokens)
    window.histogram = [a - b for a, b in zip(now.histogram, before.histogram, strict=True)]
    window.num_draft_tokens = now.num_draft_tokens - before.num_draft_tokens
    rates = ", ".join(f"{rate:.3f}" for rate in window.acceptance_per_position)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {window.mean_acceptance_length:.2f}, "
        f"Accepted throughput: {_ratio(window.num_accepted_tokens, seconds):.2f} tokens/s, "
        f"Drafted throughput: {_ratio(window.num_draft_tokens, seconds):.2f} tokens/s, "
        f"Accepted: {window.num_accepted_tokens} tokens, Drafted: {window.num_draft_tokens} tokens, "
        f"Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {100 * window.draft_acceptance_rate:.1f}%"
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
