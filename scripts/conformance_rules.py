"""Host. Conformance cases of two rules: synthetic acceptance, and block verification's ratios and thresholds."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conformance_rejection import GREEDY, NUM_SEEDS, judge, peaked, run_rejection_random, vocab_of
from conformance_tools import MismatchError, check, check_close, expect_error, first_of, ints

from jaxspec.config.speculative import SpeculativeConfig
from jaxspec.config.synthetic import conditional_rates
from jaxspec.pallas_kernels.rejection.block import (
    joint_log_ratios,
    point_mass_residual_masses,
    residual_masses,
    thresholds,
)
from jaxspec.sampling.params import SamplingParams

# synthetic ------------------------------------------------------------------------------------------------------------


def run_synthetic(given: Mapping[str, Any], expected: Any) -> None:
    if isinstance(expected, Mapping) and "error" in expected:
        expect_error(lambda: configured_rates(given), expected)
    elif "draft" in given:
        run_synthetic_rows(given, expected)
    elif "conditional" in given:  # the way back: what the rates multiply up to
        tolerance = expected.get("tolerance", 1e-9)
        name, value = next((name, value) for name, value in expected.items() if name not in ("tolerance", "note"))
        check_close(name, np.cumprod(given["conditional"]).tolist(), value, tolerance)
        nonzero = np.asarray(value) > 0
        again = np.asarray(conditional_rates(value))
        check_close("conditional", again[nonzero].tolist(), np.asarray(given["conditional"])[nonzero].tolist(), 1e-6)
    else:
        rates = configured_rates(given)
        tolerance = expected.get("tolerance", 0.035)
        for name, value in expected.items():
            if name not in ("tolerance", "note"):
                check_close(name, synthetic_figure(name, rates, given), value, tolerance)


def configured_rates(given: Mapping[str, Any]) -> tuple[float, ...]:
    """The unconditional rates that a config of these inputs has."""
    rates = first_of(given, "synthetic_acceptance_rates", "rates", "unconditional")
    length = first_of(given, "synthetic_acceptance_length", "length")
    num_tokens = first_of(given, "num_speculative_tokens", "n", "k", "K")
    config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_tokens if num_tokens is not None else len(rates),
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=rates,
        synthetic_acceptance_length=length,
    )
    assert config.num_speculative_tokens is not None
    rates = config.synthetic_rates(config.num_speculative_tokens)
    assert rates is not None
    return rates


def synthetic_figure(name: str, rates: tuple[float, ...], given: Mapping[str, Any]) -> Any:
    """Rates as resolved, or what many verdicts under them come to: by position, or tokens a round."""
    if name == "conditional":
        return list(conditional_rates(rates))
    if name in ("rates", "unconditional") and "rates" not in given and "unconditional" not in given:
        return list(rates)
    rng = np.random.default_rng(0)
    drafts = rng.integers(0, 20, (NUM_SEEDS, len(rates))).tolist()
    logits = [rng.normal(size=(len(rates) + 1, 20))] * NUM_SEEDS
    _, accepted = judge(logits, drafts, [SamplingParams(), GREEDY] * (NUM_SEEDS // 2), rule="synthetic", rates=rates)
    if "length" in name or name == "mean_num_sampled":
        return 1 + float(accepted.mean())
    if name.startswith("mean") or name.endswith("accepted"):
        return float(accepted.mean())
    by_position = [float((accepted > place).mean()) for place in range(len(rates))]
    if "conditional" not in name or "unconditional" in name:
        return by_position
    return [now / last if last else 0.0 for now, last in zip(by_position, [1.0, *by_position], strict=False)]


def run_synthetic_rows(given: Mapping[str, Any], expected: Any) -> None:
    best = [[*row, bonus] for row, bonus in zip(given["target_argmax"], given["bonus"], strict=True)]
    logits = peaked(best, given.get("vocab", vocab_of(best, given["draft"])))
    for mode in given.get("modes", ["greedy"]):
        params = [SamplingParams(temperature=0.0 if mode == "greedy" else 1.0)] * len(best)
        for seed in range(16):
            tokens, _ = judge(
                logits, given["draft"], params, seed=seed, rule="synthetic", rates=configured_rates(given)
            )
            check(tokens.tolist(), expected)


# block_verification ---------------------------------------------------------------------------------------------------


def run_block_verification(given: Mapping[str, Any], expected: Any) -> None:
    if "draft_pattern" in given:
        run_rejection_random({"rejection_sample_method": "block"} | dict(given), expected)
        return
    figures = block_figures(given) if given.get("draft") is not None else accepted_figures(given)
    for name, value in expected.items():
        if name in ("tolerance", "note", "formula"):
            continue
        figure = next((figures[key] for key in sorted(figures, key=len, reverse=True) if key in name), None)
        if figure is None:
            raise MismatchError(f"no way to check {name!r}")
        found = figure(name, value)
        if isinstance(value, bool):
            check(found, value)
        else:
            # Exact where the case says how exact; an expectation may have been rounded.
            check_close(name, found, value, expected.get("tolerance", 1e-6 if given.get("draft") else 5e-3))


def block_scalars(target: np.ndarray, draft_probs: np.ndarray | None, draft: list[int]) -> tuple[np.ndarray, ...]:
    """(joint ratios, residual masses before each draft, thresholds) of one block, in float64."""
    place = np.arange(len(draft))
    with jax.enable_x64(True), np.errstate(divide="ignore"):
        logprob_target_NV = jnp.asarray(np.log(np.asarray(target, np.float64)[: len(draft)]))
        drafted_N = logprob_target_NV[place, ints(draft)]
        if draft_probs is None:
            before_N, after_N = joint_log_ratios(drafted_N, jnp.asarray(place == 0), len(draft))
            mass_N = point_mass_residual_masses(drafted_N, before_N)
        else:
            logprob_draft_NV = jnp.asarray(np.log(np.asarray(draft_probs, np.float64)[: len(draft)]))
            before_N, after_N = joint_log_ratios(
                drafted_N - logprob_draft_NV[place, ints(draft)], jnp.asarray(place == 0), len(draft)
            )
            mass_N = residual_masses(logprob_target_NV, logprob_draft_NV, before_N)
        threshold_N = thresholds(after_N, mass_N, jnp.asarray(place == len(draft) - 1))
        return np.exp(after_N), np.asarray(mass_N), np.asarray(threshold_N)


def chances(threshold_N: np.ndarray) -> np.ndarray:
    """How likely the longest prefix that stands has 0..N drafts."""
    beyond = np.cumprod((1 - threshold_N)[::-1])[::-1]  # none from here on stands
    return np.concatenate([beyond[:1], threshold_N * np.append(beyond[1:], 1.0)])


def block_figures(given: Mapping[str, Any]) -> dict[str, Callable[[str, Any], Any]]:
    """What can be stated of one block of given drafts, by a word of the statement's name."""
    draft = given["draft"]
    joint, mass, threshold = block_scalars(given["target_probs"], given.get("draft_probs"), draft)
    uniforms = first_of(given, "uniform", "uniforms", "u")

    def masses(name: str, value: Any) -> Any:
        place = name.rpartition("pos")[2]
        if place.isdigit():
            return float(mass[int(place)])
        return mass[len(draft) - len(value) :].tolist()  # of all drafts, or of those after the first

    def longest(name: str, value: Any) -> Any:
        if uniforms is None:
            return float(chances(threshold) @ np.arange(len(draft) + 1))
        stands = np.asarray(uniforms)[: len(draft)] <= threshold
        return int(max(np.flatnonzero(stands) + 1, default=0))

    return {
        "joint_ratio": lambda name, value: joint.tolist(),
        "threshold": lambda name, value: threshold.tolist(),
        "residual_mass": masses,
        "prob": lambda name, value: chances(threshold).tolist(),
        "accepted": longest,
        "tau": longest,
    }


def accepted_figures(given: Mapping[str, Any]) -> dict[str, Callable[[str, Any], Any]]:
    """Expected accepted drafts over all drafts that may be drawn, by enumeration; verdicts agree with it."""
    target, draft_probs = np.asarray(given["target_probs"], float), np.asarray(given["draft_probs"], float)
    num_drafts = first_of(given, "gamma", "k", "K") or len(draft_probs)
    vocab_size = target.shape[1]
    blocks = [list(block) for block in itertools.product(range(vocab_size), repeat=num_drafts)]
    weights = [np.prod(draft_probs[np.arange(num_drafts), block]) for block in blocks]
    drawn = [
        float(chances(block_scalars(target, draft_probs, block)[2]) @ np.arange(num_drafts + 1)) if weight > 0 else 0.0
        for block, weight in zip(blocks, weights, strict=True)
    ]
    overlap = np.minimum(target[:num_drafts], draft_probs[:num_drafts]).sum(axis=1)
    exact = {"block": float(np.dot(weights, drawn)), "standard": float(np.cumprod(overlap).sum())}

    def figure(rule: str) -> Callable[[str, Any], float]:
        def found(name: str, value: Any) -> float:
            check_close(f"{rule} over {NUM_SEEDS} verdicts", mean_accepted(target, draft_probs, num_drafts, rule),
                        exact[rule], 0.02 * (num_drafts + 1))  # fmt: skip
            return exact[rule]

        return found

    return {"block": figure("block"), "standard": figure("standard"), "token": figure("standard")}


def mean_accepted(target: np.ndarray, draft_probs: np.ndarray, num_drafts: int, rule: str) -> float:
    rng = np.random.default_rng(1)
    columns = [rng.choice(target.shape[1], NUM_SEEDS, p=row) for row in draft_probs[:num_drafts]]
    bonus = target[num_drafts:][:1] if len(target) > num_drafts else np.full((1, target.shape[1]), 1.0)
    with np.errstate(divide="ignore"):
        logits = [np.log(np.concatenate([target[:num_drafts], bonus]))] * NUM_SEEDS
        draft_logits = [np.log(draft_probs[:num_drafts])] * NUM_SEEDS
    drafts = np.stack(columns, axis=1).tolist()
    _, accepted = judge(logits, drafts, [SamplingParams()] * NUM_SEEDS, draft_logits, rule=rule)
    return float(accepted.mean())
