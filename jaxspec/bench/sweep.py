"""Host. `jaxspec bench sweep`: every method, number of drafts and batch size against plain decoding, in one process.

How to read it. A cell is the speed-up over plain decoding at that batch size, the median of interleaved pairs; kinds of
prompts are averaged as times are, harmonically. The last line of stdout is one JSON object; with --plots the same as
pictures, plain decoding being the line at 1 (matplotlib draws them).
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec.bench.clock import harmonic_mean
from jaxspec.bench.prompts import BenchPrompt, default_prompts_path, read_prompts
from jaxspec.config.methods import METHODS, canonical_method, drafter_of
from jaxspec.config.speculative_keys import KEYS
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
        "jaxspec bench sweep", description="Methods, drafts and batch sizes against plain.", allow_abbrev=False
    )
    add_flags(parser)
    parser.add_argument("--plots", type=Path, default=None, help="folder for PNG files; needs matplotlib")
    args = parser.parse_args(argv)
    try:
        if args.plots is not None:
            _pyplot()  # before minutes of work
        report = run(args)
        print_table(report)
        if args.plots is not None:
            report["plots"] = draw(report, args.plots)
    except (JaxspecError, ValueError) as error:
        print(f"jaxspec bench sweep: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report))
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a sweep, which `jaxspec tune` has too."""
    parser.add_argument("--model", default="smollm2-135m-instruct", help="alias, hub name, folder or .gguf file")
    parser.add_argument("--prompts", type=Path, default=None, help="JSON lines; default: the prompts that ship")
    parser.add_argument("--methods", nargs="+", default=["ngram"], help="as speculative_config's method")
    parser.add_argument(
        "--num-speculative-tokens", nargs="+", default=["auto", "2", "4", "8"], help="drafts a row, or auto"
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 8], help="requests at a time")
    parser.add_argument("--pairs", type=int, default=3, help="plain/speculative pairs of runs; the median is quoted")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument(
        "--speculative-config", default="{}", help="JSON: more keys, such as model, for the methods that read them"
    )


def candidates(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The speculative_configs to try.

    Raises: ConfigError for flags that make none.
    """
    more = json.loads(args.speculative_config)
    if not isinstance(more, dict) or args.pairs < 1 or min(args.batch) < 1:
        raise ConfigError("--speculative-config must be a JSON object, and --pairs and --batch 1 or more")
    configs = []
    for method, number in itertools.product(args.methods, args.num_speculative_tokens):
        if number != "auto" and not number.isdigit():
            raise ConfigError(f"--num-speculative-tokens takes numbers and auto, got {number!r}")
        config = {"method": method, "num_speculative_tokens": number if number == "auto" else int(number)}
        configs.append(config | {key: value for key, value in more.items() if _says_something(key, method)})
    return configs


def _says_something(key: str, method: str) -> bool:
    """Whether the method reads the key; what is no key or no method is refused by the engine."""
    name = canonical_method(method)
    if key == "model" and (METHODS[name].needs == "context" or drafter_of(name) == "self"):
        return False
    return key not in KEYS or name in KEYS[key].methods


def run(args: argparse.Namespace) -> dict[str, Any]:
    """{"plain": batch -> tokens/s, "runs": a row for each config and batch}.

    Raises: ConfigError for a config that is wrong.
    """
    configs = candidates(args)
    path = args.prompts or default_prompts_path()
    kinds = read_prompts(path, load_tokenizer(resolve_model(args.model)))
    longest = max(len(one.token_ids) + one.max_tokens for prompts in kinds.values() for one in prompts)
    settings = {"dtype": args.dtype, "max_num_seqs": max(args.batch), "max_model_len": -(-(longest + 1) // 128) * 128}
    settings |= {"enable_structured_outputs": False, "enable_prefix_caching": False, "use_tqdm": False}  # asked again
    plain = Engine(args.model, **settings)
    answer(plain.core, next(iter(kinds.values()))[:1], 1, args.temperature)  # pages in what was never touched
    runs, speeds = [], {batch: [] for batch in args.batch}
    for config in configs:
        print(f"{config['method']}, {config['num_speculative_tokens']} drafts …", file=sys.stderr, flush=True)
        engine = Engine(args.model, speculative_config=config, **settings)
        answer(engine.core, next(iter(kinds.values()))[:1], 1, args.temperature)
        for batch in args.batch:
            row, plain_speeds = _compare(plain.core, engine.core, kinds, batch, args)
            speeds[batch] += plain_speeds
            runs.append({"speculative_config": config, "batch": batch} | row)
        del engine  # its memory goes to the next
    device = f"{jax.devices()[0].device_kind} ({jax.device_count()} of {jax.default_backend()})"
    report: dict[str, Any] = {"model": args.model, "prompts": str(path), "device": device, "pairs": args.pairs}
    report["plain"] = {str(batch): statistics.median(values) for batch, values in speeds.items()}
    return report | {"runs": runs}


def answer(
    core: EngineCore, prompts: Sequence[BenchPrompt], batch: int, temperature: float
) -> tuple[float, AcceptanceStats]:
    """(seconds to answer the prompts, at most `batch` at a time, what became of the drafts)."""
    waiting, flying = list(reversed(list(enumerate(prompts)))), []
    stats = AcceptanceStats(core.config.num_speculative_tokens)
    started = time.perf_counter()
    while waiting or flying:
        while waiting and len(flying) < batch:
            number, one = waiting.pop()
            params = SamplingParams(temperature=temperature, max_tokens=one.max_tokens, ignore_eos=True, seed=1)
            flying.append(core.add_request(str(number), {"prompt_token_ids": one.token_ids}, params))
        core.step()
        for request in [request for request in flying if request.is_finished]:
            flying.remove(request)
            for sequence in request.sequences:
                stats.merge(sequence.stats)
    return time.perf_counter() - started, stats


def filled(prompts: Sequence[BenchPrompt], batch: int) -> list[BenchPrompt]:
    """The prompts, in turn, as often as it takes to have `batch` of them at a time."""
    return list(prompts) * -(-batch // len(prompts))


def _compare(
    plain: EngineCore,
    speculating: EngineCore,
    kinds: Mapping[str, Sequence[BenchPrompt]],
    batch: int,
    args: argparse.Namespace,
) -> tuple[dict[str, Any], list[float]]:
    """A row of the report, and plain decoding's tokens/s in each pair."""
    kinds = {kind: filled(prompts, batch) for kind, prompts in kinds.items()}
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    stats = AcceptanceStats(speculating.config.num_speculative_tokens)
    tokens = sum(one.max_tokens for prompts in kinds.values() for one in prompts)
    totals: list[tuple[float, float]] = []
    for _ in range(args.pairs):
        pair = [0.0, 0.0]
        for kind, prompts in kinds.items():
            plain_s, _ = answer(plain, prompts, batch, args.temperature)
            spec_s, seen = answer(speculating, prompts, batch, args.temperature)
            ratios[kind].append(plain_s / spec_s)
            pair[0] += plain_s
            pair[1] += spec_s
            stats.merge(seen)
        totals.append((pair[0], pair[1]))
    by_kind = {kind: statistics.median(values) for kind, values in ratios.items()}
    pairs = [harmonic_mean([values[index] for values in ratios.values()]) for index in range(args.pairs)]
    return {
        "speedup": harmonic_mean(list(by_kind.values())),
        "speedup_min": min(pairs),
        "speedup_max": max(pairs),
        "tokens_per_s": tokens / statistics.median(spec_s for _, spec_s in totals),
        "plain_tokens_per_s": tokens / statistics.median(plain_s for plain_s, _ in totals),
        "by_kind": by_kind,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "tokens_per_round": stats.tokens_per_round,
    }, [tokens / plain_s for plain_s, _ in totals]


def lines_of(report: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Of each config, under its name, the rows by batch."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in report["runs"]:
        config = row["speculative_config"]
        lines.setdefault(f"{config['method']} {config['num_speculative_tokens']}", []).append(row)
    return lines


def print_table(report: Mapping[str, Any]) -> None:
    """Speed-ups by config and batch."""
    batches = list(report["plain"])
    print(f"{report['model']} on {report['device']}, speed-up over plain, {report['pairs']} pairs")
    print(f"{'':20}" + "".join(f"{'B=' + batch:>8}" for batch in batches))
    print(f"{'plain, tokens/s':20}" + "".join(f"{report['plain'][batch]:8.1f}" for batch in batches))
    for name, rows in lines_of(report).items():
        print(f"{name:20}" + "".join(f"{row['speedup']:8.2f}" for row in rows))


def draw(report: Mapping[str, Any], folder: Path) -> list[str]:
    """PNG files: speed against batch size, and the speed-up by kind of prompt at each batch size.

    Raises: ConfigError without matplotlib.
    """
    plt = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []

    figure, axes = plt.subplots(figsize=(7, 4.5))
    batches = [int(batch) for batch in report["plain"]]
    axes.plot(batches, list(report["plain"].values()), "k--o", label="plain")
    for name, rows in lines_of(report).items():
        axes.plot([row["batch"] for row in rows], [row["tokens_per_s"] for row in rows], "-o", label=name)
    axes.set(xlabel="requests at a time", ylabel="tokens/s, all together", title=report["model"], xticks=batches)
    axes.legend()
    paths.append(_save(figure, folder / "speed.png"))

    for batch in batches:
        rows = {name: row for name, rows in lines_of(report).items() for row in rows if row["batch"] == batch}
        figure, axes = plt.subplots(figsize=(7, 4.5))
        width = 0.8 / len(rows)
        for index, (name, row) in enumerate(rows.items()):
            at = [place + index * width for place in range(len(row["by_kind"]))]
            axes.bar(at, list(row["by_kind"].values()), width, label=name)
        kinds = list(next(iter(rows.values()))["by_kind"])
        axes.axhline(1.0, color="k", linestyle="--")
        axes.set_xticks([place + 0.4 - width / 2 for place in range(len(kinds))], kinds)
        axes.set(ylabel="speed-up over plain", title=f"{report['model']}, {batch} at a time")
        axes.legend()
        paths.append(_save(figure, folder / f"kinds-{batch}.png"))
    return paths


def _save(figure: Any, path: Path) -> str:
    figure.savefig(path, dpi=120, bbox_inches="tight")
    _pyplot().close(figure)
    return str(path)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plots needs matplotlib; pip install 'jaxspec[notebook]', or leave it out") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
