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

from jaxspec.config.schedule import dense_schedule, drafts_at
from jaxspec.engine.commit import Progress, commit_block
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.proposers.ngram import match
from jaxspec.rejection.metadata import expand_batch_to_tokens, make_metadata
from jaxspec.rejection.rows import draft_histories, parse_output
from jaxspec.sampling.params import SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parent))  # however this file was loaded
from conformance_drafts import run_config, run_vocab_mapping
from conformance_inputs import run_drafter_inputs
from conformance_rejection import run_rejection_greedy, run_rejection_random
from conformance_rules import run_block_verification, run_synthetic
from conformance_tools import MismatchError, NotYetError, check, expect_error, ints, matrix_of

matched = jax.jit(match, static_argnames=("min_n", "max_n", "num_tokens", "max_model_len"))


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


# dynamic_schedule -----------------------------------------------------------------------------------------------------


def run_dynamic_schedule(given: Mapping[str, Any], expected: Any) -> None:
    schedule = given["schedule"]
    asked = given.get("scheduled_requests", [])
    max_batch = given.get("max_batch", max([1, *asked]))
    # Without a limit on drafts no entry is clamped.
    max_tokens = given.get("k_max", given.get("num_speculative_tokens", 2**31))
    if isinstance(expected, Mapping) and "error" in expected:
        expect_error(lambda: dense_schedule(schedule, max_batch=max_batch, max_tokens=max_tokens), expected)
        return
    table = dense_schedule(schedule, max_batch=max_batch, max_tokens=max_tokens)
    if asked:
        check([drafts_at(table, num_requests, max_tokens=max_tokens) for num_requests in asked], expected)
        return
    if not isinstance(expected, Mapping):
        check(list(table), expected)
        return
    for name, value in expected.items():
        if name in ("length", "len"):
            check(len(table), value)
        elif name in ("table", "dense"):
            check(list(table), value)
        else:
            index = int(name.removeprefix("index"))
            check(table[index] if index < len(table) else "IndexError", value)


RUNNERS: dict[str, Callable[[Mapping[str, Any], Any], None]] = {
    "ngram": run_ngram,
    "rejection_greedy": run_rejection_greedy,
    "rejection_random": run_rejection_random,
    "synthetic": run_synthetic,
    "block_verification": run_block_verification,
    "metadata": run_metadata,
    "output": run_output,
    "dynamic_schedule": run_dynamic_schedule,
    "drafter_inputs": run_drafter_inputs,
    "config": run_config,
}
# Areas whose cases say something in their names alone.
NAMED_RUNNERS: dict[str, Callable[[str, Mapping[str, Any], Any], None]] = {"vocab_mapping": run_vocab_mapping}


def run_case(case: Mapping[str, Any]) -> tuple[str, str]:
    """("passed" | "failed" | "not_yet", why)."""
    area = case["area"]
    if area not in RUNNERS and area not in NAMED_RUNNERS:
        return "failed", f"no runner knows the area {area!r}"
    try:
        if area in NAMED_RUNNERS:
            NAMED_RUNNERS[area](case["name"], case["input"], case["expected"])
        else:
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
