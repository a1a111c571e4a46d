"""Host. What a load of requests came to: percentiles of waits, rates and goodput, under the names of vLLM's bench."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxspec.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
GOALS = ("ttft", "tpot", "e2el")


@dataclass
class Answer:
    """One request as its client saw it; seconds by one clock.

    arrivals: when each piece of text came. num_output_tokens: as the server counts them; error: why there is no answer.
    """

    sent: float
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Until the first piece."""
        return self.arrivals[0] - self.sent

    @property
    def e2el_s(self) -> float:
        """Until the last piece."""
        return self.arrivals[-1] - self.sent

    @property
    def tpot_s(self) -> float | None:
        """A token after the first; None of an answer of one."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Between pieces. With drafts a piece holds several tokens, so that this is what a reader waits."""
        return np.diff(self.arrivals).tolist()


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Goals in milliseconds, from words like "ttft:500".

    Raises: ConfigError for a word that is none.
    """
    goals = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            goals[name] = -1.0
        if name not in GOALS or not goals[name] > 0:
            raise ConfigError(f"--goodput takes NAME:MILLISECONDS, NAME one of {', '.join(GOALS)}, got {word!r}")
    return goals


def summarize(answers: Sequence[Answer], duration_s: float, goals: Mapping[str, float]) -> dict[str, float | int]:
    """Rates and percentiles of the answers that came; times in milliseconds.

    Args:
        goals: by name the milliseconds within which an answer counts for goodput; empty for no goodput.
    """
    good = [answer for answer in answers if answer.error is None and answer.arrivals]
    num_input = sum(answer.num_prompt_tokens for answer in good)
    num_output = sum(answer.num_output_tokens for answer in good)
    report: dict[str, float | int] = {
        "completed": len(good),
        "failed": len(answers) - len(good),
        "duration": duration_s,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
    }
    if goals:
        report["request_goodput"] = sum(_meets(answer, goals) for answer in good) / duration_s
    samples = {
        "ttft": [answer.ttft_s for answer in good],
        "tpot": [answer.tpot_s for answer in good if answer.tpot_s is not None],
        "itl": [gap for answer in good for gap in answer.itl_s],
        "e2el": [answer.e2el_s for answer in good],
    }
    for name, seconds in samples.items():
        ms = np.array(seconds or [0.0]) * 1e3
        report |= {f"mean_{name}_ms": float(ms.mean()), f"median_{name}_ms": float(np.median(ms))}
        report[f"std_{name}_ms"] = float(ms.std())
        report |= {f"p{percent}_{name}_ms": float(np.percentile(ms, percent)) for percent in PERCENTILES}
    return report


def _meets(answer: Answer, goals: Mapping[str, float]) -> bool:
    seconds = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2el": answer.e2el_s}
    return all(seconds[name] * 1e3 <= limit for name, limit in goals.items())
