"""Host. `jaxspec bench overhead`: what HTTP streaming costs over the engine itself, pair by pair.

How to read it. `jaxspec serve` runs as a process of its own, this one holds the same engine and is the client; of
the two one rests while the other is measured. A pair sends the same prompts, all at once, to `Engine.generate` and to
the server, in turn one or the other first; the server's answers stream. `ratio` is HTTP's tokens a second over the
engine's, the median of the pairs. Both answer the same number of tokens (EOS is ignored). Then the server is measured
under Poisson arrivals of --request-rate, for the time to the first byte under load. The last line of stdout is one
JSON object.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import yaml
from tqdm import tqdm

from jaxspec.bench.latency import Answer, summarize
from jaxspec.bench.prompts import BenchPrompt, default_prompts_path, read_prompts
from jaxspec.bench.serve import TargetServer, arrivals, send
from jaxspec.engine.engine import Engine
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.sampling.params import SamplingParams
from jaxspec.text.tokenizer import load_tokenizer
from jaxspec.weights.aliases import resolve_model

READY_WITHIN_S = 900.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench. Returns the exit status: 0, or 2 for a config that is wrong or a server that fails."""
    parser = argparse.ArgumentParser(
        "jaxspec bench overhead", description="HTTP streaming against the engine itself.", allow_abbrev=False
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="alias, hub name, folder or .gguf file")
    parser.add_argument("--prompts", type=Path, default=None, help="JSON lines; default: the prompts that ship")
    parser.add_argument("--num-prompts", type=int, default=None, help="of them, kinds in turn; default: --batch")
    parser.add_argument("--batch", type=int, default=8, help="rows decoded together")
    parser.add_argument("--max-tokens", type=int, default=None, help="of every answer; default: each prompt's own")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs; the median is quoted")
    parser.add_argument("--request-rate", type=float, default=None, help="then, so many requests a second; none")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--speculative-config", default="null", help="JSON, as the engine takes it; null: plain")
    args = parser.parse_args(argv)
    try:
        speculative = json.loads(args.speculative_config)
        counts = (args.batch, args.pairs, args.num_prompts, args.max_tokens)
        if any(count is not None and count < 1 for count in counts):
            raise ConfigError("--batch, --pairs, --num-prompts and --max-tokens must be 1 or more")
        report = run(args, speculative)
    except (JaxspecError, ValueError, OSError) as error:
        print(f"jaxspec bench overhead: {error}", file=sys.stderr)
        return 2
    _print_table(report)
    print(json.dumps(report))
    return 0


def run(args: argparse.Namespace, speculative: dict[str, Any] | None) -> dict[str, Any]:
    """Both sides' tokens a second, their ratio, and the waits for a first byte.

    Raises: ConfigError for a config that is wrong, or a server that does not start or answer.
    """
    kinds = read_prompts(args.prompts or default_prompts_path(), load_tokenizer(resolve_model(args.model)))
    prompts = in_turn(kinds, args.num_prompts or args.batch, args.max_tokens)
    longest = max(len(one.token_ids) + one.max_tokens for one in prompts)
    settings = {
        "model": args.model,
        "dtype": args.dtype,
        "max_num_seqs": args.batch,
        "max_model_len": -(-(longest + 1) // 128) * 128,
        "speculative_config": speculative,
        "enable_structured_outputs": False,  # its programs would not run
        "enable_prefix_caching": False,  # prompts are asked again and again
    }
    seconds: dict[str, list[float]] = {"engine": [], "http": []}
    streamed: list[Answer] = []
    with serving(settings) as server:  # the engine comes second: what the server compiled it reads
        engine = Engine(**settings, use_tqdm=False)
        _generate(engine, prompts[:1])  # not counted: page in what was never touched
        _stream(server, prompts[:1])
        for index in tqdm(range(args.pairs), desc="pairs"):
            for side in ("engine", "http") if index % 2 == 0 else ("http", "engine"):
                if side == "engine":
                    seconds[side].append(_generate(engine, prompts))
                else:
                    answers, elapsed = _stream(server, prompts)
                    seconds[side].append(elapsed)
                    streamed += answers
        loaded = None
        if args.request_rate is not None:
            load = [_body(one) for one in prompts] * 2
            loaded = summarize(*send(server, load, arrivals(len(load), args.request_rate, 1.0, 0), None), {})
    tokens = sum(one.max_tokens for one in prompts)
    ratios = [own / http for own, http in zip(seconds["engine"], seconds["http"], strict=True)]
    first = summarize(streamed, sum(seconds["http"]), {})
    report: dict[str, Any] = {
        "model": args.model,
        "device": f"{jax.devices()[0].device_kind} ({jax.device_count()} of {jax.default_backend()})",
        "batch": args.batch,
        "num_prompts": len(prompts),
        "num_tokens": tokens,
        "pairs": args.pairs,
        "speculative_config": speculative,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "chunks_per_token": sum(len(answer.arrivals) for answer in streamed) / (tokens * args.pairs),
    }
    report |= {f"{side}_tokens_per_s": tokens / statistics.median(values) for side, values in seconds.items()}
    report |= _waits(first, "at_once")
    if loaded is not None:
        report |= {"request_rate": args.request_rate, "failed": loaded["failed"]} | _waits(loaded, "loaded")
    return report


def in_turn(kinds: dict[str, list[BenchPrompt]], number: int, max_tokens: int | None) -> list[BenchPrompt]:
    """So many prompts, one of each kind after the other, again from the first when all are taken."""
    most = max(map(len, kinds.values()))
    mixed = [group[index] for index in range(most) for group in kinds.values() if index < len(group)]
    chosen = [mixed[index % len(mixed)] for index in range(number)]
    return [BenchPrompt(one.name, one.kind, one.token_ids, max_tokens or one.max_tokens) for one in chosen]


@contextmanager
def serving(settings: dict[str, Any]) -> Iterator[TargetServer]:
    """A server process over these settings, ready, on a port of its own; ended with the block.

    Raises: ConfigError when it does not come up.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        yaml.safe_dump(settings, config)
        config.flush()
        own = {name: value for name, value in os.environ.items() if not name.startswith("JAXSPEC_")}
        words = ["--config", config.name, "--host", "127.0.0.1", "--port", "0", "--startup-probe-tokens", "0"]
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxspec.serve", *words], env=own, text=True, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        log: list[str] = []
        reading = threading.Thread(target=log.extend, args=(process.stderr,))  # or it would wait for its pipe
        try:
            port = None
            while port is None and (line := process.stderr.readline()):
                log.append(line)
                port = re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)
            reading.start()
            server = TargetServer(f"http://127.0.0.1:{port[1] if port else 0}", None)
            deadline = time.monotonic() + READY_WITHIN_S
            while not (port and server.is_ready()):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ConfigError(f"the server did not start: {''.join(log[-5:]).strip() or 'it says nothing'}")
                time.sleep(0.1)
            yield server
        finally:
            process.terminate()
            process.wait()
            if reading.ident is not None:
                reading.join()
            process.stderr.close()


def _generate(engine: Engine, prompts: Sequence[BenchPrompt]) -> float:
    params = [SamplingParams(temperature=0.0, max_tokens=one.max_tokens, ignore_eos=True) for one in prompts]
    started = time.perf_counter()
    engine.generate([{"prompt_token_ids": one.token_ids} for one in prompts], params, use_tqdm=False)
    return time.perf_counter() - started


def _stream(server: TargetServer, prompts: Sequence[BenchPrompt]) -> tuple[list[Answer], float]:
    answers, elapsed = send(server, [_body(one) for one in prompts], [0.0] * len(prompts), None)
    for answer, one in zip(answers, prompts, strict=True):
        if answer.error is not None or answer.num_output_tokens != one.max_tokens:
            raise ConfigError(
                f"the server gave {answer.num_output_tokens} tokens, not {one.max_tokens}: {answer.error}"
            )
    return answers, elapsed


def _body(one: BenchPrompt) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": one.token_ids, "max_tokens": one.max_tokens, "temperature": 0}
    return body | {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


def _waits(figures: dict[str, float | int], when: str) -> dict[str, float]:
    return {f"{name}_ms_{when}": figures[f"{name}_ms"] for name in ("median_ttft", "p99_ttft", "median_itl", "p99_itl")}


def _print_table(report: dict[str, Any]) -> None:
    print(f"{report['model']} on {report['device']}, {report['num_prompts']} prompts, {report['batch']} at a time")
    for side in ("engine", "http"):
        print(f"{side:8} {report[f'{side}_tokens_per_s']:10.1f} tokens/s")
    print(f"{'ratio':8} {report['ratio']:10.3f}  ({report['ratio_min']:.3f} to {report['ratio_max']:.3f})")
    for when in ("at_once", "loaded"):
        if f"median_ttft_ms_{when}" in report:
            waits = [f"{name} {report[f'{name}_ms_{when}']:.0f}" for name in ("median_ttft", "p99_ttft", "median_itl")]
            print(f"{when:8} {', '.join(waits)} ms")
