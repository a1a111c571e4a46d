"""Host. `jaxspec bench offline`: speculation against the engine's own plain decoding, in one process, pair by pair.

How to read it. Decoding one sequence reads every weight once a round, so `bandwidth_floor_ms` bounds a plain step from
below. A drafting round costs `round_ms`, little more than a plain step as long as the device is bound by memory, and
gives `tokens_per_round` tokens: their product with the rounds is the time, and the ratio to plain is the speed-up.
Answers have the length each prompt asks for (EOS is ignored). The last line of stdout is one JSON object.
"""

import argparse
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxspec.bench.clock import harmonic_mean
from jaxspec.bench.parts import run_round, time_parts
from jaxspec.bench.prompts import BenchPrompt, default_prompts_path, read_prompts
from jaxspec.engine.core import EngineCore
from jaxspec.engine.engine import Engine
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.sampling.params import SamplingParams
from jaxspec.text.tokenizer import load_tokenizer
from jaxspec.weights.aliases import resolve_model


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench. Returns the exit status: 0, or 2 for a config that is wrong."""
    parser = argparse.ArgumentParser(
        "jaxspec bench offline", description="Speculation against plain decoding.", allow_abbrev=False
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="alias, hub name, folder or .gguf file")
    parser.add_argument("--prompts", type=Path, default=None, help="JSON lines; default: the prompts that ship")
    parser.add_argument("--batch", type=int, default=1, help="rows decoded together")
    parser.add_argument("--pairs", type=int, default=7, help="plain/speculative pairs of runs; the median is quoted")
    parser.add_argument("--dtype", default="bfloat16", help="auto, float32 or bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="of sampled decoding; 1 keeps all tokens")
    parser.add_argument("--speculative-config", required=True, help="JSON, as the engine takes it")
    args = parser.parse_args(argv)
    try:
        speculative = json.loads(args.speculative_config)
        if args.batch < 1 or args.pairs < 1 or not isinstance(speculative, dict):
            raise ConfigError("--batch and --pairs must be 1 or more, and --speculative-config a JSON object")
        report = run(args, speculative)
    except (JaxspecError, ValueError) as error:
        print(f"jaxspec bench: {error}", file=sys.stderr)
        return 2
    _print_table(report)
    print(json.dumps(report))
    return 0


def run(args: argparse.Namespace, speculative: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the bench measures, by the names of docs/design.md section 6."""
    path = args.prompts or default_prompts_path()
    kinds = read_prompts(path, load_tokenizer(resolve_model(args.model)))
    longest = max(len(one.token_ids) + one.max_tokens for prompts in kinds.values() for one in prompts)
    settings = {"dtype": args.dtype, "max_num_seqs": args.batch, "max_model_len": -(-(longest + 1) // 128) * 128}
    settings["enable_structured_outputs"] = False  # its programs would not run
    settings["enable_prefix_caching"] = False  # prompts are asked again and again
    settings["async_scheduling"] = False  # rounds are run by hand, too
    plain = Engine(args.model, **settings)
    speculating = Engine(args.model, speculative_config=speculative, **settings)
    compiles_before = speculating.compiles_after_ready  # compiling one engine is no fault of the other

    cores = {"plain": plain.core, "spec": speculating.core}
    seconds: dict[str, dict[str, list[float]]] = {side: {kind: [] for kind in kinds} for side in cores}
    stats = {kind: AcceptanceStats(speculating.config.num_speculative_tokens) for kind in kinds}
    for core in cores.values():  # not counted: page in what was never touched
        _answer(core, next(iter(kinds.values()))[:1], args, AcceptanceStats(core.config.num_speculative_tokens))
    for _ in tqdm(range(args.pairs), desc="pairs"):
        for kind, prompts in kinds.items():
            for side, core in cores.items():
                counted = stats[kind] if side == "spec" else AcceptanceStats(0)
                seconds[side][kind].append(_answer(core, prompts, args, counted))
    host_share, host_ms = _host_share(speculating.core, kinds, args)
    compiles_after_ready = speculating.compiles_after_ready - compiles_before
    peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    how = {"repeats": max(args.pairs, 7) * 3, "temperature": args.temperature, "top_p": args.top_p}
    parts = time_parts(speculating.core, args.batch, **how)
    plain_parts = time_parts(plain.core, args.batch, **how)
    return _report(args, path, kinds, seconds, stats) | {
        "host_share": host_share,
        "host_ms_per_round": host_ms,
        "compiles_after_ready": compiles_after_ready,
        "peak_rss_bytes": peak_rss_bytes,
        "round_over_verify": parts["round_ms"] / parts["verify_ms"],
        **parts,
        "plain_step_ms": plain_parts["round_ms"],
        "device": f"{jax.devices()[0].device_kind} ({jax.device_count()} of {jax.default_backend()}), "
        f"{platform.machine()}",
        "speculative_config": dict(speculative),
        "num_programs": len(speculating.core.parts.programs.plan),
        "compile_seconds": speculating.core.parts.programs.compile_seconds,
    }


def _answer(
    core: EngineCore, prompts: Sequence[BenchPrompt], args: argparse.Namespace, stats: AcceptanceStats
) -> float:
    """Seconds to answer the prompts, as many at a time as the engine has rows; acceptance is added to `stats`."""
    started = time.perf_counter()
    requests = [core.add_request(one.name, {"prompt_token_ids": one.token_ids}, _params(one, args)) for one in prompts]
    while core.has_work:
        core.step()
    elapsed = time.perf_counter() - started
    for request in requests:
        for sequence in request.sequences:
            stats.merge(sequence.stats)
    return elapsed


def _params(one: BenchPrompt, args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature, top_p=args.top_p, max_tokens=one.max_tokens, ignore_eos=True, seed=1
    )


def _host_share(
    core: EngineCore, kinds: Mapping[str, Sequence[BenchPrompt]], args: argparse.Namespace
) -> tuple[float, float]:
    """1 - rounds x back-to-back time of the same executable / wall decode time, and the difference a round in ms.

    Each batch is decoded twice from the same start: by the engine, and by calling its program as often without a look
    in between. The device holds lengths and finish flags, so both do the same rounds; where drafts come from the host,
    rounds of the same shapes.
    """
    wall = device = 0.0
    num_rounds = 0
    prompts = [one for group in kinds.values() for one in group]
    for first in range(0, len(prompts), args.batch):
        group = prompts[first : first + args.batch]
        _prefill(core, group, args)
        started, widths = time.perf_counter(), []
        while core.has_work:
            core.step()
            widths.append(core.last_host_width)
        wall += time.perf_counter() - started
        num_rounds += len(widths)

        requests = _prefill(core, group, args)
        batch = core.running_batch()
        jax.block_until_ready(core.state)
        started, packed = time.perf_counter(), None
        for width in widths:
            packed = run_round(core, batch, width, core.parts.programs.shapes.max_rounds)
        jax.block_until_ready(packed)
        device += time.perf_counter() - started
        for request in requests:
            core.abort(request.request_id)
    return 1.0 - device / wall, (wall - device) * 1e3 / num_rounds


def _prefill(core: EngineCore, prompts: Sequence[BenchPrompt], args: argparse.Namespace) -> list[Any]:
    """Queue prompts and step until all of them decode."""
    requests = [core.add_request(one.name, {"prompt_token_ids": one.token_ids}, _params(one, args)) for one in prompts]
    while len(core.scheduler.decoding) < len(prompts):
        core.step()
    return requests


def _report(
    args: argparse.Namespace,
    path: Path,
    kinds: Mapping[str, Sequence[BenchPrompt]],
    seconds: Mapping[str, Mapping[str, Sequence[float]]],
    stats: Mapping[str, AcceptanceStats],
) -> dict[str, Any]:
    tokens = {kind: sum(one.max_tokens for one in prompts) for kind, prompts in kinds.items()}
    by_kind = {}
    for kind in kinds:
        ratios = np.array(seconds["plain"][kind]) / np.array(seconds["spec"][kind])
        by_kind[kind] = {
            "speedup": float(np.median(ratios)),
            "speedup_min": float(ratios.min()),
            "speedup_max": float(ratios.max()),
            "mean_acceptance_length": stats[kind].mean_acceptance_length,
            "tokens_per_round": stats[kind].tokens_per_round,
            "plain_tokens_per_s": tokens[kind] / statistics.median(seconds["plain"][kind]),
            "spec_tokens_per_s": tokens[kind] / statistics.median(seconds["spec"][kind]),
        }
    total = AcceptanceStats(0)
    for one in stats.values():
        total.merge(one)
    speeds = {
        side: sum(tokens.values()) / sum(statistics.median(values) for values in seconds[side].values())
        for side in seconds
    }
    return {
        "model": args.model,
        "prompts": str(path),
        "batch": args.batch,
        "pairs": args.pairs,
        "dtype": args.dtype,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "plain_tokens_per_s": speeds["plain"],
        "spec_tokens_per_s": speeds["spec"],
        "speedup": harmonic_mean([entry["speedup"] for entry in by_kind.values()]),
        "mean_acceptance_length": total.mean_acceptance_length,
        "draft_acceptance_rate": total.draft_acceptance_rate,
        "tokens_per_round": total.tokens_per_round,
        "acceptance_per_position": total.acceptance_per_position,
        "by_kind": by_kind,
    }


def _print_table(report: Mapping[str, Any]) -> None:
    print(f"{report['model']} on {report['device']}, batch {report['batch']}, {report['pairs']} pairs")
    print(f"{'kind':10} {'speed-up':>9} {'(min - max)':>15} {'accept len':>11} {'tok/round':>10} {'plain tok/s':>12}")
    for kind, row in report["by_kind"].items():
        spread = f"({row['speedup_min']:.2f} - {row['speedup_max']:.2f})"
        print(
            f"{kind:10} {row['speedup']:9.2f} {spread:>15} {row['mean_acceptance_length']:11.2f} "
            f"{row['tokens_per_round']:10.2f} {row['plain_tokens_per_s']:12.1f}"
        )
    print(f"{'all':10} {report['speedup']:9.2f} {'harmonic mean':>15}")
    for key in ("round_ms", "verify_ms", "draft_ms", "reject_ms", "plain_step_ms", "prefill_ms", "bandwidth_floor_ms"):
        print(f"{key:20} {report[key]:8.2f}")
    print(f"{'host_share':20} {report['host_share']:8.3f}   compiles after ready: {report['compiles_after_ready']}")
