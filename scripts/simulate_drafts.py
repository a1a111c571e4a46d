#!/usr/bin/env python3
"""Host. What `num_speculative_tokens: auto` makes of recorded answers, by made-up costs: no model, no machine's noise.

python scripts/simulate_drafts.py

Answers are the golden ones of SmolLM2 (12 prompts of six kinds, 96 tokens), drafts those of n-gram lookup with suffixes
of 2 to 4 tokens. A round with w drafts a row takes 1 + slope * w plain rounds, the slope being what docs/log.md has for
the batch size on two CPU cores. Speeds are taken while all rows are busy; a figure is the speed-up over plain decoding.
"""

import json
import random
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxspec.engine.drafting import DraftChooser, Row
from jaxspec.proposers.widths import best_width, narrowest
from jaxspec.step.costs import RoundCosts

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "data" / "goldens" / "smollm2_greedy.json"
SLOPES = {1: 0.085, 4: 0.17, 8: 0.23}
MOST, WIDTHS = 8, (0, 2, 8)
Text = tuple[tuple[int, ...], tuple[int, ...]]  # prompt, answer


def lookup(history: tuple[int, ...], cache: dict[Any, tuple[int, ...]]) -> tuple[int, ...]:
    """What followed the earliest occurrence of the longest suffix of 2 to 4 tokens; at most MOST tokens."""
    if history not in cache:
        cache[history] = ()
        for size in (4, 3, 2):
            suffix = history[-size:]
            at = next((s for s in range(len(history) - size) if history[s : s + size] == suffix), None)
            if at is not None:
                cache[history] = history[at + size : at + size + MOST]
                break
    return cache[history]


def seconds_a_token(texts: list[Text], batch: int, number: int | None, cache: dict) -> float:
    """number: drafts a row in every round, None: auto."""
    widths = WIDTHS if number is None else (0, number) if number else (0,)
    seconds = np.array([1 + SLOPES[batch] * width for width in widths])
    shapes: Any = SimpleNamespace(num_host_drafts=0, num_weighed=MOST, widths=(widths,), widths_of=lambda rows: widths)
    config: Any = SimpleNamespace(
        num_speculative_tokens=MOST, speculative_config=SimpleNamespace(num_speculative_tokens_per_batch_size=None)
    )
    costs = RoundCosts((1,), widths, {batch: seconds[None]}) if number is None else None
    chooser = DraftChooser(config, shapes, costs)
    waiting, flying = list(enumerate(texts)), []
    total, tokens = 0.0, 0
    while True:
        while waiting and len(flying) < batch:
            flying.append([*waiting.pop(), 0])
        if len(flying) < batch:
            return total / tokens
        drafts = [lookup(prompt + answer[:at], cache)[: len(answer) - at - 1] for _, (prompt, answer), at in flying]
        counts_B = np.array([min(len(draft), widths[-1]) for draft in drafts], np.int32)
        choice = chooser.choose([Row(str(name), 1, None) for name, _, _ in flying], batch)
        if number is None:
            all_B = np.ones(batch, np.bool_)
            width = int(best_width(np, choice.survival, counts_B, all_B, choice.seconds, widths))
        else:
            width = int(narrowest(np, counts_B, widths))
        total += float(seconds[width])
        for row, draft, count in zip(flying, drafts, counts_B.tolist(), strict=True):
            name, (_, answer), at = row
            draft = draft[: min(count, widths[width])]
            kept = next((k for k, token in enumerate(draft) if token != answer[at + k]), len(draft))
            row[2] += kept + 1
            tokens += kept + 1
            chooser.observe(str(name), len(draft), kept)
        chooser.end_round(choice)
        for row in [row for row in flying if row[2] >= len(row[1][1])]:
            chooser.forget(str(row[0]))
            flying.remove(row)


def main() -> None:
    """Print a table."""
    kinds: dict[str, list[Text]] = {}
    for case in json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]:
        kinds.setdefault(case["kind"], []).append((tuple(case["prompt_token_ids"]), tuple(case["token_ids"])))
    loads = {kind: texts * 24 for kind, texts in kinds.items()} | {
        "mixed": [t for ts in kinds.values() for t in ts] * 8
    }
    for texts in loads.values():
        random.Random(1).shuffle(texts)
    cache: dict = {}
    print(f"{'':14}" + "".join(f"{name:>9}" for name in loads) + f"{'kinds':>9}")
    for batch in SLOPES:
        for number in (2, 4, 8, None):
            speeds = {
                name: seconds_a_token(texts, batch, 0, cache) / seconds_a_token(texts, batch, number, cache)
                for name, texts in loads.items()
            }
            mean = statistics.harmonic_mean([speeds[kind] for kind in kinds])
            name = f"B={batch}, {'auto' if number is None else f'K={number}'}"
            print(f"{name:14}" + "".join(f"{speed:9.2f}" for speed in speeds.values()) + f"{mean:9.2f}", flush=True)


if __name__ == "__main__":
    main()
