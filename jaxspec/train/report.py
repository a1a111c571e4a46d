"""Host. What a run says: one JSON line a step, plots of loss and of acceptance by place."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.train.trainers.base import Metrics


def summary(metrics: Metrics) -> dict[str, Any]:
    """Means of summed metrics, by place ahead.

    loss: cross-entropy of a guess. accuracy: guesses that are the target's likeliest token. kept: those whose guesses
    before are too. tokens_per_round: 1 + the sum of `kept`, what greedy decoding would yield on these very texts.
    """
    asked = np.maximum(np.asarray(metrics.num_asked_K), 1.0)
    kept = np.asarray(metrics.num_kept_K) / asked
    return {
        "loss_by_place": _rounded(np.asarray(metrics.loss_K) / np.maximum(np.asarray(metrics.num_taught_K), 1.0)),
        "accuracy": _rounded(np.asarray(metrics.num_right_K) / asked),
        "kept": _rounded(kept),
        "tokens_per_round": round(1.0 + float(kept.sum()), 4),
    }


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 4) for value in values]


class Log:
    """`log.jsonl` of a run. What lies beyond the step that a run goes on from is dropped."""

    def __init__(self, folder: Path, step: int):
        self.path = folder / "log.jsonl"
        kept = [line for line in read_log(folder) if line["step"] <= step]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Add one line; it has a "step"."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; one that was cut off is left out."""
    path, lines = folder / "log.jsonl", []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                continue
    return lines


def plot(folder: Path) -> None:
    """`loss.png` and `acceptance.png` of what the log holds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_log(folder)

    def draw(name: str, label: str, curves: dict[str, tuple[list[int], list[float]]]) -> None:
        figure = Figure(figsize=(7, 4))
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for title, (steps, values) in curves.items():
            axes.plot(steps, values, label=title)
        axes.set_xlabel("optimiser steps")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if curves:
            axes.legend()
        figure.savefig(folder / name, dpi=100, bbox_inches="tight")

    training = [line for line in lines if "loss" in line]
    held_out = [line for line in lines if "held_out" in line]
    losses = {"training": ([line["step"] for line in training], [line["loss"] for line in training])}
    draw("loss.png", "loss", losses if training else {})
    num_ahead = len(held_out[-1]["held_out"]["kept"]) if held_out else 0
    steps = [line["step"] for line in held_out]
    by_place = {f"place {k + 1}": (steps, [line["held_out"]["kept"][k] for line in held_out]) for k in range(num_ahead)}
    draw("acceptance.png", "held-out guesses kept, teacher-forced", by_place)
