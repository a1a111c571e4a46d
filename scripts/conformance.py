#!/usr/bin/env python3
"""Host. Runs a file of conformance vectors through the functions that step and engine call.

    python scripts/conformance.py tests/data/vectors/vectors.json

Prints a line a case, then a JSON summary {"passed", "failed", "not_yet", "by_area", "failures"}; exits 1 on a failure.
Cases of what is not built yet are "not_yet": neither passed nor failed. An unknown area is a failure.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine.commit import Progress, commit_block
from jaxspec.keys import request_key
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.proposers.ngram import match
from jaxspec.rejection.metadata import expand_batch_to_tokens, make_metadata
from jaxspec.rejection.rows import draft_histories, parse_output
from jaxspec.rejection.verify import verify
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.table import make_table
from jaxspec.types import Drafts

NUM_SEEDS = 4096  # draws of a case with stated probabilities: 4 standard deviations are below 0.032


matched = jax.jit(match, static_argnames=("min_n", "max_n", "num_tokens", "max_model_len"))
verified = jax.jit(verify, static_argnames="rule")


class NotYetError(Exception):
    """The case needs something that jaxspec does not have yet."""


class MismatchError(Exception):
    """The case gives something other than expected."""


def check(found: Any, expected: Any) -> None:
    if found != expected:
        raise MismatchError(f"expected {expected!r}, got {found!r}")


def ints(values: Any) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


# ngram ----------------------------------------------------------------------------------------------------------------


def run_ngram(given: Mapping[str, Any], expected: Any) -> None:
    rows = given["rows"] if "rows" in given else [given["tokens"]]
    # A row with no sampled token is still prefilling: it has nothing committed yet.
    is_decoding = [bool(tokens) for tokens in given.get("sampled_token_ids", [[0]] * len(rows))]
    history = np.full((len(rows), -(-max(1, *map(len, rows)) // 128) * 128), -1)
    for index, row in enumerate(rows):
        history[index, : len(row)] = row
    drafts = matched(
        ints(history),
        ints([len(row) if decodes else 0 for row, decodes in zip(rows, is_decoding, strict=True)]),
        min_n=given["min_n"],
        max_n=given["max_n"],
        num_tokens=given["k"],
        max_model_len=given["max_model_len"],
    )
    pairs = zip(drafts.token_ids_BK.tolist(), drafts.counts_B.tolist(), strict=True)
    proposed = [row[:count] for row, count in pairs]
    check(proposed if "rows" in given else proposed[0], expected)


# rejection ------------------------------------------------------------------------------------------------------------


# Cases are padded to few shapes: what is compiled for one serves many, and padding must not show.
MIN_ROWS, MIN_DRAFTS, MIN_VOCAB = 4, 6, 128


def judge(
    logits: list[np.ndarray],
    draft_rows: list[list[int]],
    params: list[SamplingParams],
    draft_logits: list[np.ndarray] | None = None,
    *,
    seed: int = 0,
    rule: str = "standard",
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [B, K + 1], accepted [B]) of one round; logits: one [drafts + 1, V] array a row. K: the most drafts."""
    num_rows, num_drafts, vocab_size = len(logits), max(map(len, draft_rows)), logits[0].shape[1]
    B, K, V = max(num_rows, MIN_ROWS), max(num_drafts, MIN_DRAFTS), max(vocab_size, MIN_VOCAB)

    def padded(rows: list[np.ndarray], num_positions: int) -> jax.Array:
        out = np.full((B, num_positions, V), np.nan, np.float32)
        out[num_rows:] = 0
        for index, row in enumerate(rows):
            out[index, : len(row)] = -np.inf
            out[index, : len(row), :vocab_size] = row
        return jnp.asarray(out)

    ids = np.full((B, K), -1)
    for index, row in enumerate(draft_rows):
        ids[index, : len(row)] = row
    counts = [len(row) for row in draft_rows] + [0] * (B - num_rows)
    logits_BKV = None if draft_logits is None else padded(draft_logits, K)
    keys = np.stack([request_key(seed, row) for row in range(B)])
    table = make_table([*params, *[params[0]] * (B - num_rows)], keys)
    drafts = Drafts(token_ids_BK=ints(ids), counts_B=ints(counts), logits_BKV=logits_BKV)
    verdict = verified(padded(logits, K + 1), drafts, table, jnp.full(B, 10, jnp.int32), rule=rule)
    tokens = np.asarray(verdict.token_ids_BJ)[:num_rows]
    check(bool((tokens[:, num_drafts + 1 :] == -1).all()), True)
    return tokens[:, : num_drafts + 1], np.asarray(verdict.num_accepted_B)[:num_rows]


def peaked(rows: list[list[int]], vocab_size: int, margin: float = 20.0) -> list[np.ndarray]:
    """Logits whose arg-max is the given id at every position."""
    return [margin * np.eye(vocab_size)[row] for row in rows]


def vocab_of(*ids: Any) -> int:
    return max([0, *(token for token in jax.tree.leaves(ids))]) + 2


def run_rejection_greedy(given: Mapping[str, Any], expected: Any) -> None:
    needs = {"frequency_penalty", "presence_penalty", "repetition_penalty", "bad_words", "disallowed_ranges"} & set(
        given
    )
    if needs:
        raise NotYetError(f"{', '.join(sorted(needs))}")
    if "bonus" not in given:
        run_verified_blocks(given, expected)
        return
    best = [[*row, bonus] for row, bonus in zip(given["target_argmax"], given["bonus"], strict=True)]
    logits = peaked(best, given.get("vocab", vocab_of(best, given["draft"])))
    tokens, _ = judge(logits, given["draft"], [SamplingParams(temperature=0.0)] * len(best))
    check(tokens.tolist(), expected)


def run_verified_blocks(given: Mapping[str, Any], expected: Any) -> None:
    """dflash_chain: column 0 of each block is committed already; row j of the target judges column j + 1."""
    target = matrix_of(given, "target")
    blocks = matrix_of(given, "candidate", "block", "draft")
    logits = peaked(target, vocab_of(target, blocks))
    judged = judge(logits, [block[1:] for block in blocks], [SamplingParams(temperature=0.0)] * len(blocks))
    tokens, accepted = (array.tolist() for array in judged)
    kept = [row[: count + 1] for row, count in zip(tokens, accepted, strict=True)]
    if not isinstance(expected, Mapping):
        check(tokens if len(expected[0]) == len(tokens[0]) else kept, expected)
        return
    for name, value in expected.items():
        if "accept" in name:
            check(accepted, value)
        elif "bonus" in name:
            check([row[-1] for row in kept], value)
        elif "token" in name or "output" in name or "commit" in name:
            check(tokens if len(value[0]) == len(tokens[0]) else kept, value)
        else:
            raise MismatchError(f"no way to check {name!r}")


def matrix_of(given: Mapping[str, Any], *words: str) -> list[list[int]]:
    """The input that is a list of lists and has one of the words in its name."""
    for word in words:
        for name, value in given.items():
            if word in name and isinstance(value, list) and all(isinstance(row, list) for row in value):
                return value
    raise MismatchError(f"no list of lists named like {words} among {sorted(given)}")


def run_rejection_random(given: Mapping[str, Any], expected: Any) -> None:
    if given.get("rejection_sample_method", "standard") not in ("standard", "coupled"):
        raise NotYetError(f"rejection_sample_method {given['rejection_sample_method']}")
    if "target_logit_argmax" in given:
        best = [[*row, bonus] for row, bonus in zip(given["target_logit_argmax"], given["bonus"], strict=True)]
        logits = peaked(best, given["vocab"], given["margin"])
        params = [SamplingParams(temperature=temperature) for temperature in given["temperature"]]
        for rule in ("standard", "coupled"):
            for seed in range(32):
                tokens, _ = judge(logits, given["draft"], params, seed=seed, rule=rule)
                check(tokens.tolist(), expected)
        return
    if "draft_pattern" in given:
        vocab_size = 16
        target = [(3 * place + 1) % vocab_size for place in range(given["K"] + 1)]
        if not given["target_equals_draft"]:
            target = [(token + 1) % vocab_size for token in target]
        drafts = [
            -1 if one == "-1" else (3 * place + 1) % vocab_size for place, one in enumerate(given["draft_pattern"])
        ]
        target_probs, draft_probs = np.eye(vocab_size)[target], None
    else:
        drafts, draft_probs = given["draft"], given["draft_probs"]
        bonus = np.eye(given["vocab"])[given["bonus"]]
        target_probs = np.concatenate(
            [np.asarray(given["target_probs"], float).reshape(-1, given["vocab"]), bonus[None]]
        )
    filters = {name: given[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in given}
    rules = ("standard", "coupled") if draft_probs is None else ("standard",)
    for rule in rules:
        check_draws(many_draws(target_probs, drafts, draft_probs, filters, rule), expected)


def many_draws(target_probs, drafts, draft_probs, filters, rule) -> np.ndarray:
    """The verdicts of NUM_SEEDS requests that differ by their key alone."""

    def repeated(probs) -> list[np.ndarray]:
        with np.errstate(divide="ignore"):
            return [np.log(np.asarray(probs, np.float64))] * NUM_SEEDS

    params = [SamplingParams(**{"temperature": 1.0} | filters)] * NUM_SEEDS
    draft_logits = None if draft_probs is None else repeated(draft_probs)
    tokens, _ = judge(repeated(target_probs), [drafts] * NUM_SEEDS, params, draft_logits, rule=rule)
    return tokens


def check_draws(tokens_BJ: np.ndarray, expected: Any) -> None:
    """expected: the one possible row, or statements about many: see `statements`."""
    if not isinstance(expected, Mapping):
        rows = np.unique(tokens_BJ, axis=0).tolist()
        check(rows, [expected])
        return
    for name, value in expected.items():
        if name not in ("tolerance", "note"):
            check_statement(tokens_BJ, name, value, expected.get("tolerance", 0.035))


def check_statement(tokens_BJ: np.ndarray, name: str, value: Any, tolerance: float) -> None:
    """One statement about many draws: a bound on the number of tokens, a frequency, or a distribution."""
    num_sampled = (tokens_BJ >= 0).sum(axis=1)
    words = name.split("_")
    figure: Any
    if name in ("max_num_sampled", "min_num_sampled"):
        check(int(getattr(num_sampled, words[0])()), value)
        return
    if words[:3] == ["frac", "num", "sampled"]:
        figure, words = float((num_sampled == int(words[3])).mean()), words[4:]
    elif name in ("accept_prob", "acceptance_rate", "accept_rate", "accept_prob_range", "acceptance_rate_range"):
        figure, words = float((num_sampled > 1).mean()), words[2:]
    elif name in ("mean_num_sampled", "mean_num_sampled_range"):
        figure, words = float(num_sampled.mean()), words[3:]
    elif name in ("in_vocab", "in_range"):
        check(bool((tokens_BJ[:, 0] >= 0).all()), value)
        return
    elif name in ("probs", "first_token_probs", "recovered_probs", "output_probs", "distribution"):
        chosen = tokens_BJ[:, 0] if name != "recovered_probs" else tokens_BJ[num_sampled == 1, 0]
        figure, words = (np.bincount(chosen, minlength=len(value)) / max(len(chosen), 1)).tolist(), []
    else:
        raise MismatchError(f"no way to check {name!r}")
    if words == ["gt"] or words == ["lt"]:
        is_right = figure > value if words == ["gt"] else figure < value
    elif words == ["range"]:
        is_right = value[0] <= figure <= value[1]
    else:
        is_right = np.shape(figure) == np.shape(value) and np.abs(np.subtract(figure, value)).max() <= tolerance
    if not is_right:
        raise MismatchError(f"{name} {value!r}: got {figure!r}")


# metadata -------------------------------------------------------------------------------------------------------------


def run_metadata(given: Mapping[str, Any], expected: Any) -> None:
    if "num_draft_tokens" in given:
        run_index_arrays(given, expected)
    elif "cu_num_tokens" in given:
        run_expand(given, expected)
    elif "vocab" in given or "vocab_size" in given:
        check(parse_output(matrix_of(given, ""), given.get("vocab_size", given.get("vocab"))), expected)
    else:
        run_histories(given, expected)


def run_index_arrays(given: Mapping[str, Any], expected: Any) -> None:
    counts = given["num_draft_tokens"]
    spare = 3  # padding that must not show
    ends = None if given.get("cu_num_scheduled_tokens") is None else ints(given["cu_num_scheduled_tokens"])
    metadata = make_metadata(ints(counts), ends, max_drafts=sum(counts) + spare)
    found = {
        "cu_num_draft_tokens": metadata.cu_num_draft_tokens_B.tolist(),
        "cu_num_sampled_tokens": metadata.cu_num_sampled_tokens_B.tolist(),
        "logits_indices": metadata.logits_indices_R.tolist()[:-spare],
        "target_logits_indices": metadata.target_logits_indices_N.tolist()[:-spare],
        "bonus_logits_indices": metadata.bonus_logits_indices_B.tolist(),
    }
    if "draft_token_ids" in expected:
        fed = given["input_ids"] if "input_ids" in given else given["token_ids"]
        found["draft_token_ids"] = [fed[row + 1] for row in metadata.target_rows_N.tolist()[:-spare]]
    check({name: found.get(name) for name in expected}, dict(expected))


def run_expand(given: Mapping[str, Any], expected: Any) -> None:
    (values,) = (value for name, value in given.items() if isinstance(value, list) and name != "cu_num_tokens")
    is_whole = all(isinstance(value, int) for value in values)
    expanded = expand_batch_to_tokens(
        jnp.asarray(values, jnp.int32 if is_whole else jnp.float32),
        ints(given["cu_num_tokens"]),
        given.get("num_tokens", given["cu_num_tokens"][-1]),
        replace_from=given.get("replace_from"),
        replace_to=given.get("replace_to", 0),
    )
    if not np.allclose(expanded, expected) or len(expanded) != len(expected):
        raise MismatchError(f"expected {expected!r}, got {expanded.tolist()!r}")


def run_histories(given: Mapping[str, Any], expected: Any) -> None:
    drafts = matrix_of(given, "draft", "spec")
    histories = draft_histories(matrix_of(given, "output"), drafts)
    if expected and expected[0] and isinstance(expected[0][0], list):  # grouped by request
        ends = np.cumsum([len(row) for row in drafts])
        histories = [histories[end - len(row) : end] for end, row in zip(ends, drafts, strict=True)]
    check(histories, expected)


# output ---------------------------------------------------------------------------------------------------------------


def run_output(given: Mapping[str, Any], expected: Any) -> None:
    if "cases" in given:
        stats = []
        for case in given["cases"]:
            one = AcceptanceStats(case["drafts"])
            one.observe(case["drafts"], case["generated"] - 1, case["generated"])
            stats.append(
                {"accepted": one.num_accepted_tokens, "rejected": one.num_draft_tokens - one.num_accepted_tokens}
            )
        check(stats, expected)
        return
    params = SamplingParams(
        max_tokens=given["maxt"],
        min_tokens=given.get("mint", given.get("min_tokens", 0)),
        stop_token_ids=given.get("stops"),
        ignore_eos=given.get("ignore_eos", False),
    )
    progress = Progress(params, frozenset({given["eos"]}), given["maxt"])
    # What came before: any ids that end nothing.
    before = next(token for token in range(1, 1000) if token not in (given["eos"], *(given.get("stops") or ())))
    commit_block(progress, [before] * given["prev"])
    cut = commit_block(progress, given["new"])
    finish = progress.finish_reason
    if progress.stop_reason is not None:
        finish = f"{finish}:{progress.stop_reason}"
    check({"kept": list(cut.token_ids), "finish": finish}, expected)


RUNNERS: dict[str, Callable[[Mapping[str, Any], Any], None]] = {
    "ngram": run_ngram,
    "rejection_greedy": run_rejection_greedy,
    "rejection_random": run_rejection_random,
    "metadata": run_metadata,
    "output": run_output,
}
NOT_BUILT_YET = ("synthetic", "block_verification", "drafter_inputs", "dynamic_schedule", "vocab_mapping", "config")


def run_case(case: Mapping[str, Any]) -> tuple[str, str]:
    """("passed" | "failed" | "not_yet", why)."""
    area = case["area"]
    if area in NOT_BUILT_YET:
        return "not_yet", f"area {area}"
    if area not in RUNNERS:
        return "failed", f"no runner knows the area {area!r}"
    try:
        RUNNERS[area](case["input"], case["expected"])
    except NotYetError as missing:
        return "not_yet", str(missing)
    except Exception as error:  # a case that breaks a runner has failed, and the others go on
        return "failed", f"{type(error).__name__}: {error}"
    return "passed", ""


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: conformance.py FILE", file=sys.stderr)
        return 2
    by_area: dict[str, Counter[str]] = {}
    failures = []
    for case in json.loads(Path(arguments[0]).read_text(encoding="utf-8")):
        outcome, why = run_case(case)
        print(f"{outcome:8}{case['area']}/{case['name']}{': ' + why if why else ''}")
        by_area.setdefault(case["area"], Counter(passed=0, failed=0, not_yet=0))[outcome] += 1
        if outcome == "failed":
            failures.append({"area": case["area"], "name": case["name"], "why": why})
    totals = sum(by_area.values(), Counter())
    summary = {outcome: totals[outcome] for outcome in ("passed", "failed", "not_yet")}
    print(json.dumps(summary | {"by_area": by_area, "failures": failures}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
