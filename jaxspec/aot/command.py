"""Host. `jaxspec aot`: a config on accelerators that are not there. Nothing is loaded, and no device is needed.

How to read it. Memory is a device's. A round's time is a roofline: no program is faster, and what comes on top is said
in docs/aot.md. The last line with --json is one object that holds every figure.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxspec.aot.compiling import LAYERS, compile_in_child
from jaxspec.aot.describe import describe
from jaxspec.aot.page import page_of
from jaxspec.aot.report import (
    DEFAULT_CONTEXT,
    acceptance_lengths,
    default_context,
    fewest_devices,
    fit_of,
    paper_of,
    report_of,
    text_of,
)
from jaxspec.aot.settle import settle
from jaxspec.aot.topology import CHIPS, topology_of
from jaxspec.config.engine import EngineConfig
from jaxspec.config.load import gather, pick
from jaxspec.config.server import ServerConfig
from jaxspec.errors import ConfigError, JaxspecError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 where the config fits, 1 where it does not or a program does not
    compile, 2 for a config that is wrong."""
    parser = argparse.ArgumentParser(
        "jaxspec aot",
        description="Says whether a config fits on accelerators that are not there, and what it would cost.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="YAML file; later files win")
    parser.add_argument(
        "--topology",
        required=True,
        metavar="NAME",
        help=f"chip and how many, such as v6e:2x4 or h100:8; {', '.join(CHIPS)}",
    )
    parser.add_argument(
        "--models", action="append", default=[], type=Path, metavar="FOLDER",
        help="where NAME.json describes the model NAME; 'models' beside the config files",
    )  # fmt: skip
    parser.add_argument(
        "--tensor", type=int, default=None, metavar="N",
        help="in place of tensor_parallel_size; the fewest devices that hold all rows, where neither is given",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=int, default=None, metavar="TOKENS",
        help=f"that each request holds; {DEFAULT_CONTEXT}, or what target and drafter can hold",
    )  # fmt: skip
    parser.add_argument(
        "--acceptance-length", nargs="+", type=float, default=None, metavar="L", help="tokens a round; 1.5 2 2.5 3"
    )
    parser.add_argument("--no-compile", action="store_true", help="figures on paper alone")
    parser.add_argument(
        "--layers", nargs="+", type=int, default=list(LAYERS), metavar="N",
        help="numbers of layers to compile, the rest being continued in a straight line; 2 4",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=None, metavar="S", help="for the compiler; none")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--html", type=Path, default=None, metavar="FILE", help="write the report as one page")
    args = parser.parse_args(argv)
    try:
        report = run(args)
    except JaxspecError as error:
        print(f"jaxspec aot: {error}", file=sys.stderr)
        return 2
    print(text_of(report))
    print(f"\n{report['made']}")
    if args.html is not None:
        args.html.write_text(page_of(report, made=report["made"]), encoding="utf-8")
    if args.json:
        print(json.dumps(report))
    is_compiled = not any("error" in one for one in (report["compiled"] or {}).get("programs", ()))
    return 0 if report["fit"]["fits"] and is_compiled else 1


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report of the words of a command line.

    Raises: JaxspecError for what is wrong with them, or with the config.
    """
    if not args.config:
        raise ConfigError("--config FILE is needed; configs/ has some")
    topology = topology_of(args.topology)
    # Keys of the server's may stand in the same file; they cost nothing here.
    config = pick(EngineConfig, gather((EngineConfig, ServerConfig), args))
    folders = [*args.models, *dict.fromkeys(Path(path).parent / "models" for path in args.config)]
    described = describe(config, folders)
    if args.tensor is not None:
        if args.tensor < 1:
            raise ConfigError(f"--tensor {args.tensor} must be 1 or more")
        config = config.model_copy(update={"tensor_parallel_size": args.tensor})
    resolved = settle(config, described, topology)
    context = default_context(resolved) if args.context is None else args.context
    if not 1 <= context <= resolved.max_model_len:
        raise ConfigError(f"--context {context} must be in [1, {resolved.max_model_len}], the config's max_model_len")
    if min(args.layers) < 1:
        raise ConfigError(f"--layers {min(args.layers)} must be 1 or more")
    lengths = acceptance_lengths(args.acceptance_length, resolved.num_speculative_tokens)
    is_told = args.tensor is not None or "tensor_parallel_size" in config.model_fields_set
    paper = paper_of(config, described, topology) if is_told else fewest_devices(config, described, topology, context)
    programs: list[dict[str, Any]] = []
    if not args.no_compile:
        pages = max(min(resolved.num_pages, fit_of(paper, config).pages), 1)
        split = config.model_copy(update={"tensor_parallel_size": paper.num_devices})
        programs = compile_in_child(split, folders, topology, pages, layers=args.layers, timeout=args.timeout)
    report = report_of(paper, config, context=context, lengths=lengths, programs=programs)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return report | {"made": f"{today}, jax {version('jax')}, jaxspec {version('jaxspec')}"}


if __name__ == "__main__":
    raise SystemExit(main())
