"""Host. `jaxspec replay FILE`: what an engine recorded runs again, and the same plans and tokens must come out."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.build import build
from jaxspec.engine.core import EngineCore
from jaxspec.engine.journal import FORMAT, Event, Journal, costs_of, params_of
from jaxspec.engine.probe import probe_at_start
from jaxspec.errors import ConfigError, JaxspecError

MAX_LINE = 64 * 2**20  # bytes; a prompt of a million tokens takes a tenth


def main(argv: Sequence[str] | None = None) -> int:
    """Replay a journal. Returns the exit status: 0, 1 where something came out otherwise, 2 for what is no journal."""
    parser = argparse.ArgumentParser("jaxspec replay", description="Runs a record again.", allow_abbrev=False)
    parser.add_argument("file", type=Path, metavar="FILE", help="what an engine with `record` wrote")
    parser.add_argument("--steps", type=int, default=None, help="stop after so many steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        report = replay(args.file, args.steps)
    except JaxspecError as error:
        print(f"jaxspec replay: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report) if args.json else _for_people(report))
    return 0 if report["difference"] is None else 1


def replay(path: Path, max_steps: int | None = None) -> dict[str, Any]:
    """Run a journal again.

    Returns: num_steps and num_tokens that came out the same; difference: None, or the first event that did not, as
    `line`, `recorded` and `found`.

    Raises:
        ConfigError: the file is no journal, or what it holds cannot be asked of an engine.
    """
    lines = _read(path)
    _, head = next(lines, (1, {}))
    if head.get("event") != "engine" or head.get("format") != FORMAT:
        raise ConfigError(f"{path} must begin with an engine of {FORMAT}; give a file that `record` wrote")
    found: list[Event] = []
    core = _core(path, head, Journal(found.append))
    report: dict[str, Any] = {"file": str(path), "num_steps": 0, "num_tokens": 0, "difference": None}
    for number, event in tqdm(lines, desc="replay", unit=" events", disable=None):
        if max_steps is not None and report["num_steps"] >= max_steps:
            break
        found.clear()
        _happen(core, event, f"{path}, line {number}")
        if found != [event]:
            report["difference"] = {"line": number, "recorded": event, "found": found[0] if found else None}
            break
        if event["event"] == "step":
            report["num_steps"] += 1
            report["num_tokens"] += sum(map(len, event["tokens"].values()))
    return report


def _core(path: Path, head: Event, journal: Journal) -> EngineCore:
    try:
        config = EngineConfig(**head["config"])
        costs = None if head["costs"] is None else costs_of(head["costs"])
        num_probe_tokens = int(head["startup_probe_tokens"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}, line 1 is not as `record` writes it: {error!r}") from error
    core = EngineCore(dataclasses.replace(build(config, show_progress=True), costs=costs), journal)
    if num_probe_tokens:
        probe_at_start(core, num_probe_tokens)
    return core


def _happen(core: EngineCore, event: Event, where: str) -> None:
    try:
        match event["event"]:
            case "add":
                prompt = {"prompt_token_ids": event["prompt"]}
                if event["cache_salt"] is not None:
                    prompt["cache_salt"] = event["cache_salt"]
                core.add_request(event["id"], prompt, params_of(event["params"]), event["priority"])
            case "abort":
                core.abort(event["id"])
            case "step":
                core.step()
            case other:
                raise ConfigError(f"{where}: {other!r} is no event; give a file that `record` wrote")
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where} is not as `record` writes it: {error!r}") from error


def _read(path: Path) -> Iterator[tuple[int, Event]]:
    """(number, object) of each line; the last may be cut off, as where a process was killed."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
                if not line.endswith(b"\n"):
                    return
                event = json.loads(line)
                if not isinstance(event, dict):
                    raise ConfigError(f"{path}, line {number} must be a JSON object")
                yield number, event
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}; give a file that `record` wrote") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no journal: {error}; give a file that `record` wrote") from error


def _for_people(report: dict[str, Any]) -> str:
    said = f"{report['num_steps']} steps and {report['num_tokens']} tokens came out as recorded"
    difference = report["difference"]
    if difference is None:
        return said
    return "\n".join(
        [
            f"{said}; then, at line {difference['line']} of {report['file']}:",
            f"  recorded  {json.dumps(difference['recorded'])}",
            f"  found     {json.dumps(difference['found'])}",
        ]
    )
