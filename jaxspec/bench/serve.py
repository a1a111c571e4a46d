"""Host. `jaxspec bench serve`: requests that arrive by chance at a server that is up, and how long each waited.

How to read it. TTFT is the time to the first piece of text, TPOT a token after the first, ITL between two pieces (with
drafts a piece holds several tokens), E2EL the whole answer. Goodput counts only the answers within the goals. Arrivals
are a Poisson process of --request-rate, or all at once. The last line of stdout is one JSON object, under the names of
vLLM's `bench serve`.
"""

import argparse
import http.client
import json
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from jaxspec.bench.latency import PERCENTILES, Answer, parse_goodput, summarize
from jaxspec.bench.prompts import NEEDS, default_prompts_path
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.text.prompt_lines import read_prompt_lines

COUNTERS: tuple[str, ...] = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
TIMEOUT_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench. Returns the exit status: 0, 1 where a request failed, 2 for a wrong flag or no server."""
    parser = argparse.ArgumentParser("jaxspec bench serve", description="A load on a live server.", allow_abbrev=False)
    parser.add_argument("--base-url", default=None, help="of the server; default: --host and --port")
    parser.add_argument("--host", default="127.0.0.1", help="of the server")
    parser.add_argument("--port", type=int, default=8000, help="of the server")
    parser.add_argument("--model", default=None, help="name the server answers to; default: the one it lists")
    parser.add_argument("--prompts", type=Path, default=None, help="JSON lines; default: the prompts that ship")
    parser.add_argument("--num-prompts", type=int, default=None, help="requests; the file's prompts in turn")
    parser.add_argument("--request-rate", type=float, default=float("inf"), help="requests a second; inf: all at once")
    parser.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; below it bursts, above it even")
    parser.add_argument("--max-concurrency", type=int, default=None, help="requests in flight at most")
    parser.add_argument("--goodput", nargs="*", default=[], help="goals in milliseconds, such as ttft:500 tpot:50")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--ignore-eos", action="store_true", help="answers of exactly max_tokens tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--api-key", default=None, help="bearer token")
    args = parser.parse_args(argv)
    try:
        report = run(args)
    except (JaxspecError, OSError, http.client.HTTPException) as error:
        print(f"jaxspec bench serve: {error}", file=sys.stderr)
        return 2
    _print_table(report)
    print(json.dumps(report))
    return 0 if report["failed"] == 0 else 1


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Send the load, and measure it.

    Raises: ConfigError for flags that fit nothing, OSError where there is no server.
    """
    goals = parse_goodput(args.goodput)
    if (
        args.request_rate <= 0
        or args.burstiness <= 0
        or any(count is not None and count < 1 for count in (args.max_concurrency, args.num_prompts))
    ):
        raise ConfigError("--request-rate, --burstiness, --max-concurrency and --num-prompts must be above 0")
    server = TargetServer(args.base_url or f"http://{args.host}:{args.port}", args.api_key)
    model = args.model or server.get_json("/v1/models")["data"][0]["id"]
    bodies = read_bodies(args.prompts or default_prompts_path())
    num_prompts = args.num_prompts or len(bodies)
    common = {"model": model, "temperature": args.temperature, "stream": True, "ignore_eos": args.ignore_eos}
    common["stream_options"] = {"include_usage": True}
    load = [bodies[index % len(bodies)] | common for index in range(num_prompts)]
    before = server.counters()
    answers, duration = send(
        server, load, arrivals(num_prompts, args.request_rate, args.burstiness, args.seed), args.max_concurrency
    )
    report: dict[str, Any] = {"model_id": model, "num_prompts": num_prompts, "request_rate": args.request_rate}
    if args.request_rate == float("inf"):
        report["request_rate"] = "inf"  # JSON has no such number
    report |= {"burstiness": args.burstiness, "max_concurrency": args.max_concurrency}
    report |= summarize(answers, duration, goals) | acceptance(before, server.counters())
    errors = sorted({answer.error for answer in answers if answer.error is not None})
    return report | ({"errors": errors} if errors else {})


def arrivals(number: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """When each request is sent, in seconds from the start: gaps of a gamma distribution of mean 1 / rate, whose shape
    is the burstiness (1: exponential gaps, a Poisson process)."""
    if rate == float("inf"):
        return [0.0] * number
    draw, at, times = random.Random(seed), 0.0, []
    for _ in range(number):
        times.append(at)
        at += draw.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times


def read_bodies(path: Path) -> list[dict[str, Any]]:
    """The prompts as request bodies: {"messages" or "prompt", "max_tokens"}.

    Raises: ConfigError for a file that holds none, or a line that is none.
    """

    def body_of(row: dict[str, Any], number: int) -> dict[str, Any]:
        del number
        key = "messages" if "messages" in row else "prompt"
        return {key: row[key], "max_tokens": row["max_tokens"]}

    return read_prompt_lines(path, body_of, NEEDS)


def send(
    server: "TargetServer", load: Sequence[Mapping[str, Any]], times: Sequence[float], most: int | None
) -> tuple[list[Answer], float]:
    """Send each request at its time, at most so many at once: (answers in order, seconds until the last had come)."""
    gate = threading.Semaphore(most or len(load))
    started = time.perf_counter()

    def one(body: Mapping[str, Any], at: float) -> Answer:
        time.sleep(max(0.0, started + at - time.perf_counter()))
        with gate:
            return server.ask(body)

    with ThreadPoolExecutor(max_workers=len(load)) as pool:
        answers = list(pool.map(one, load, times))
    return answers, time.perf_counter() - started


def acceptance(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> dict[str, float]:
    """What the server's drafts came to between two scrapes; nothing where it does not say."""
    if before is None or after is None:
        return {}
    drafts, drafted, accepted = (after[name] - before[name] for name in COUNTERS)
    return {
        "spec_decode_num_drafts": drafts,
        "spec_decode_num_draft_tokens": drafted,
        "spec_decode_num_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": accepted / drafted if drafted else 0.0,
        "spec_decode_acceptance_length": 1 + accepted / drafts if drafts else 0.0,
    }


class TargetServer:
    """A live server, as a client has it: a connection a request."""

    def __init__(self, base_url: str, api_key: str | None):
        """Raises: ConfigError for what is no address."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the server's address must begin with http:// or https://, got {base_url!r}")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._root = parts.hostname, parts.port, parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def _connection(self) -> http.client.HTTPConnection:
        return self._kind(self._host, self._port, timeout=TIMEOUT_S)

    def _get(self, path: str) -> str | None:
        connection = self._connection()
        try:
            connection.request("GET", self._root + path, headers=self._headers)
            response = connection.getresponse()
            text = response.read().decode()
            return text if response.status == 200 else None
        finally:
            connection.close()

    def get_json(self, path: str) -> Any:
        """Raises: ConfigError where the server does not answer with JSON."""
        text = self._get(path)
        if text is None:
            raise ConfigError(f"{path} of the server does not answer; is it ready, and the API key right?")
        return json.loads(text)

    def is_ready(self) -> bool:
        """Whether it is there and says that it serves."""
        try:
            return self._get("/health") is not None
        except OSError:
            return False

    def counters(self) -> dict[str, float] | None:
        """The server's counters of drafts, summed over its engines; None where it has none, or is no more."""
        try:
            text = self._get("/metrics")
        except OSError:
            text = None
        if text is None:
            return None
        names = {f"vllm:spec_decode_{name}_total": name for name in COUNTERS}
        found: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in names:
                    found[names[sample.name]] += sample.value
        return found

    def ask(self, body: Mapping[str, Any]) -> Answer:
        """One streamed answer."""
        connection = self._connection()
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = Answer(sent=time.perf_counter())
        try:
            connection.request("POST", self._root + path, json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {response.read()[:200].decode(errors='replace')}"
                return answer
            for line in response:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    self._take(answer, json.loads(line[6:]))
        except (OSError, ValueError, http.client.HTTPException) as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        if answer.error is None and not answer.arrivals:
            answer.error = "an answer without text"
        return answer

    @staticmethod
    def _take(answer: Answer, chunk: Mapping[str, Any]) -> None:
        if chunk.get("error"):
            answer.error = str(chunk["error"])[:200]
        if usage := chunk.get("usage"):
            answer.num_prompt_tokens = usage["prompt_tokens"]
            answer.num_output_tokens = usage["completion_tokens"]
        if any(choice.get("text") or choice.get("delta", {}).get("content") for choice in chunk.get("choices", ())):
            answer.arrivals.append(time.perf_counter())


def _print_table(report: Mapping[str, Any]) -> None:
    print(f"{report['completed']} answers, {report['failed']} failed, in {report['duration']:.1f} s")
    for name in ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"):
        if name in report:
            print(f"{name:24} {report[name]:10.2f} a second")
    names = ("mean", "median", *(f"p{percent}" for percent in PERCENTILES if percent != 50))
    print(f"{'milliseconds':12}" + "".join(f"{name:>10}" for name in names))
    for kind in ("ttft", "tpot", "itl", "e2el"):
        print(f"{kind:12}" + "".join(f"{report[f'{name}_{kind}_ms']:10.1f}" for name in names))
    if "spec_decode_acceptance_length" in report:
        print(
            f"drafts: mean acceptance length {report['spec_decode_acceptance_length']:.2f}, "
            f"rate {report['spec_decode_acceptance_rate']:.2f}"
        )
    for error in report.get("errors", ()):
        print(f"failed: {error}")
