"""Host. How the bench times: back to back on the device, alternating what is compared, medians out."""

import statistics
import time
from collections.abc import Callable, Sequence

import jax


def back_to_back_ms(run: Callable[[], object], calls: int) -> float:
    """Milliseconds a call of a function that leaves work on the device, with one wait at the end."""
    started = time.perf_counter()
    last = None
    for _ in range(calls):
        last = run()
    jax.block_until_ready(last)
    return (time.perf_counter() - started) * 1e3 / calls


def interleaved_ms(runs: dict[str, Callable[[], object]], *, repeats: int, calls: int) -> dict[str, float]:
    """Median milliseconds a call of each function, taken in turn so that a drift of the machine's speed hits all."""
    for run in runs.values():
        jax.block_until_ready(run())
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            samples[name].append(back_to_back_ms(run, calls))
    return {name: statistics.median(values) for name, values in samples.items()}


def harmonic_mean(values: Sequence[float]) -> float:
    """The mean of speed-ups: the speed-up of a mix in which every kind takes the same time without speculation."""
    return len(values) / sum(1.0 / value for value in values)
