"""Host. `jaxspec verify`: the proof, for the user's own model and drafter, that speculation changes no answer.

Exit status: 0 lossless, 1 a fault was found, 2 nothing could be verified. On stdout is a table, or one JSON object
with --json.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.config.engine import EngineConfig
from jaxspec.config.load import add_flags, gather, parse_flags, pick
from jaxspec.engine.build import build
from jaxspec.engine.core import EngineCore
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.sampling.params import SamplingParams
from jaxspec.tools.checks import PROVED_BY_DISTRIBUTION, rule_of, verify
from jaxspec.tools.prompts import default_prompts_path, read_prompts, tokenizer_of

DEFAULTS = {"temperature": 0.0, "max_tokens": 64}
# Where a distribution is tested, many short answers tell more than few long ones.
NUM_ANSWERS, SHORT = 1024, 8
MOST_LISTED = 20  # findings in the table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proof. Returns the exit status."""
    parser = argparse.ArgumentParser(
        "jaxspec verify",
        description="Proves that an engine's speculative answers are those of plain decoding: greedily and under the "
        "coupled rule token by token, under the others by the distribution of every token. Greedy unless --temperature "
        "is given.",
        allow_abbrev=False,
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON lines with messages, prompt or prompt_token_ids"
    )
    parser.add_argument("--num-prompts", type=int, metavar="N", help="read no more prompts than these")
    parser.add_argument(
        "--margin", type=float, metavar="GAP", help="logits nearer than this may tie; by dtype if not given"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    _add_sampling_flags(parser)
    add_flags(parser, (EngineConfig,))
    try:
        args = parse_flags(parser, sys.argv[1:] if argv is None else argv)
        if args.positional_model is not None:
            args.model = args.positional_model
        report = run(args)
    except JaxspecError as error:
        print(f"jaxspec verify: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report))
    else:
        print_table(report)
    return 0 if report["verdict"] == "lossless" else 1


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Build the engine that the flags describe, and verify it."""
    started = time.monotonic()
    data = gather((EngineConfig,), args)
    config = pick(EngineConfig, data)
    given = _given_sampling(args)
    params = SamplingParams(**(DEFAULTS | given))
    if args.num_prompts is not None and args.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {args.num_prompts}")
    prompts = read_prompts(args.prompts or default_prompts_path(), tokenizer_of(config), args.num_prompts)
    if config.max_model_len is None and params.max_tokens is not None:
        # No more cache than the proof needs.
        most = max(len(prompt) for prompt in prompts) + params.max_tokens
        config = pick(EngineConfig, data | {"max_model_len": -(-most // 64) * 64})
    core = EngineCore(build(config, show_progress=True))
    if rule_of(core, params) in PROVED_BY_DISTRIBUTION:
        fitting = {"n": -(-NUM_ANSWERS // len(prompts)), "max_tokens": SHORT}
        params = dataclasses.replace(params, **{name: fitting[name] for name in fitting.keys() - given.keys()})
    report = verify(core, prompts, params, seed=config.seed, margin=args.margin, show_progress=True)
    speculative = core.config.speculative_config
    return report | {
        "model": config.model,
        "dtype": core.config.dtype,
        "platform": core.config.platform,
        "speculative_config": speculative.model_dump() if speculative is not None else None,
        "sampling": {name: value for name, value in dataclasses.asdict(params).items() if value != _DEFAULTS[name]},
        "seconds": round(time.monotonic() - started, 1),
    }


_DEFAULTS = {entry.name: entry.default for entry in dataclasses.fields(SamplingParams)} | {
    "stop": (),
    "stop_token_ids": (),
}


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """One flag a sampling parameter; its value is JSON, or a bare text."""
    group = parser.add_argument_group("sampling", "as SamplingParams; values are JSON. --n is the answers a prompt")
    for entry in dataclasses.fields(SamplingParams):
        if entry.name != "seed":  # the engine's own --seed is the first request's
            flag = "--" + entry.name.replace("_", "-")
            group.add_argument(flag, dest=f"sampling.{entry.name}", default=argparse.SUPPRESS, metavar="VALUE")


def _given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    given = {}
    for name, text in vars(args).items():
        if name.startswith("sampling."):
            try:
                given[name.removeprefix("sampling.")] = json.loads(text)
            except json.JSONDecodeError:
                given[name.removeprefix("sampling.")] = text
    if isinstance(bias := given.get("logit_bias"), dict):  # JSON knows no integer keys
        given["logit_bias"] = {int(key) if key.isdecimal() else key: value for key, value in bias.items()}
    return given


def print_table(report: Mapping[str, Any]) -> None:
    """The report for people."""
    acceptance = report["acceptance"]
    print(f"{report['model']}, {report['dtype']} on {report['platform']}, rule {report['rule']}")
    print(
        f"{report['num_answers']} answers to {report['num_prompts']} prompts, {report['num_tokens']} tokens; "
        f"{acceptance['num_accepted_draft_tokens']} of {acceptance['num_draft_tokens']} drafts accepted, "
        f"mean acceptance length {acceptance['mean_acceptance_length']:.2f}"
    )
    if "num_equal_answers" in report:
        print(f"{report['num_equal_answers']} of {report['num_answers']} answers are plain decoding's, token for token")
    for test in report.get("tests", ()):
        line = f"  {test['group']:16} {test['test']:16} {test['tokens']:7} tokens"
        if test["tested"]:
            line += f"  G {test['G']:8.1f}  df {test['df']:3}  p {test['p']:.2g}{'  FAULT' if test['failed'] else ''}"
            line += f"  (detects a shift of {test['detects']:.3f})"
        else:
            line += "  too few to test"
        print(line)
    for title, findings in (("tie", report["ties"]), ("FAULT", report["faults"])):
        listed = [finding for finding in findings if finding["kind"] != "distribution"]
        for finding in listed[:MOST_LISTED]:
            print(f"  {title}: {_sentence(finding)}")
        if len(listed) > MOST_LISTED:
            print(f"  … {len(listed) - MOST_LISTED} more; --json lists all")
    exact = " in exact mode" if report["exact"] else ""
    print(
        f"{report['verdict']}{exact}: {report['num_faults']} faults, {report['num_ties']} ties "
        f"(logits within {report['margin']:g}), {report['seconds']} s"
    )


def _sentence(finding: Mapping[str, Any]) -> str:
    said = f"prompt {finding['prompt']} seed {finding['seed']} position {finding['position']}: token {finding['token']}"
    if finding["expected"] is not None:
        said += f", expected {finding['expected']}"
    if finding["gap"] is not None:
        said += f", gap {finding['gap']:.3g}"
    return f"{said} ({finding['kind']})"
