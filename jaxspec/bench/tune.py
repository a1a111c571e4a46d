"""Host. `jaxspec tune`: which speculative_config is the fastest on your own prompts, written as a file that `--config`
takes.

It runs `jaxspec bench sweep`. The winner has the best speed-up, batch sizes averaged as times are; where it is not
above plain decoding by more than its pairs differ, plain decoding wins.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxspec.bench.clock import harmonic_mean
from jaxspec.bench.sweep import add_flags, lines_of, print_table, run
from jaxspec.errors import JaxspecError

LEAST_GAIN = 1.02  # over plain decoding; less is the machine's noise


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep and write the winner. Returns the exit status: 0, or 2 for a config that is wrong."""
    parser = argparse.ArgumentParser(
        "jaxspec tune", description="Writes the best speculative_config.", allow_abbrev=False
    )
    add_flags(parser)
    parser.add_argument("--output", type=Path, default=Path("tuned.yaml"), help="YAML file to write, for --config")
    args = parser.parse_args(argv)
    try:
        report = run(args)
        speedup, config = best(report)
        args.output.write_text(document(report, speedup, config), encoding="utf-8")
    except (JaxspecError, ValueError, OSError) as error:
        print(f"jaxspec tune: {error}", file=sys.stderr)
        return 2
    print_table(report)
    print(f"best: {json.dumps(config)}, speed-up {speedup:.2f}; written to {args.output}")
    print(json.dumps(report | {"best": config, "best_speedup": speedup, "output": str(args.output)}))
    return 0


def best(report: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(speed-up, speculative_config) of the winner; None: plain decoding."""
    winner: tuple[float, dict[str, Any] | None] = (1.0, None)
    for rows in lines_of(report).values():
        speedup = harmonic_mean([row["speedup"] for row in rows])
        certain = harmonic_mean([row["speedup_min"] for row in rows])
        if speedup >= LEAST_GAIN and certain > 1.0 and speedup > winner[0]:
            winner = (speedup, dict(rows[0]["speculative_config"]))
    return winner


def document(report: Mapping[str, Any], speedup: float, config: Mapping[str, Any] | None) -> str:
    """The YAML file, which says where it comes from."""
    lines = [
        f"# Written by `jaxspec tune`: {speedup:.2f} times plain decoding's speed over {report['prompts']},",
        f"# requests at a time: {', '.join(report['plain'])}; {report['device']}.",
    ]
    settings = {"model": report["model"], "speculative_config": None if config is None else dict(config)}
    return "\n".join(lines) + "\n" + yaml.safe_dump(settings, sort_keys=False)
