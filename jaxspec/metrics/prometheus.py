"""Host. What a scraper sees: the engine's counters under vLLM's metric names, so that its dashboards work unchanged."""

import copy
import threading
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jaxspec.metrics.acceptance import AcceptanceStats

LABELS = ("model_name", "engine")
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TOKENS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
LATENCY_BUCKETS = (0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0)


class EngineMetrics:
    """Counters of one engine, in a registry of its own. The engine's thread writes, the server's reads.

    NOTE: one lock makes a scrape a snapshot; without it a round counted between two reads could show more accepted
    than drafted.
    """

    def __init__(self, model_name: str, num_spec_tokens: int, engine: str = "0"):
        """num_spec_tokens: drafts a row may have in a round (0 without speculation)."""
        self._lock = threading.Lock()
        self._acceptance = AcceptanceStats(num_spec_tokens)
        self._registry = CollectorRegistry()
        self._names = {"model_name": model_name, "engine": engine}

        self._num_drafts = self._counter("spec_decode_num_drafts", "Row-rounds with at least one draft")
        self._num_draft_tokens = self._counter("spec_decode_num_draft_tokens", "Tokens drafted")
        self._num_accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Drafts the target kept")
        per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts the target kept, by position",
            (*LABELS, "position"),
            registry=self._registry,
        )
        self._per_position = [per_position.labels(**self._names, position=str(i)) for i in range(num_spec_tokens)]

        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens prefilled")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens that the prefix cache held")
        self._preemptions = self._counter("num_preemptions", "Answers that gave their pages up, to go on later")
        self._generation_tokens = self._counter("generation_tokens", "Tokens committed to answers")
        self._request_success = Counter(
            "vllm:request_success",
            "Requests finished, by reason",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._num_running = self._gauge("vllm:num_requests_running", "Requests in a row of the batch")
        self._num_waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait for a row")
        self._cache_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the cache's pages in use, 0 to 1")
        self._compiles = self._gauge("jaxspec:compiles_after_ready", "Programs compiled after the engine was ready")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", FIRST_TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds", "Mean time a token after the first, one a request", PER_TOKEN_BUCKETS
        )
        self._latency = self._histogram("e2e_request_latency_seconds", "Arrival to finish", LATENCY_BUCKETS)
        self._request_per_token = self._histogram(
            "request_time_per_output_token_seconds", "vLLM's newer name for the same", PER_TOKEN_BUCKETS
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Between an answer's tokens, once however many came together",
            PER_TOKEN_BUCKETS,
        )
        self._queue_time = self._histogram("request_queue_time_seconds", "Arrival to a row", FIRST_TOKEN_BUCKETS)
        self._prefill_time = self._histogram("request_prefill_time_seconds", "Row to first token", FIRST_TOKEN_BUCKETS)
        self._decode_time = self._histogram("request_decode_time_seconds", "First token to finish", LATENCY_BUCKETS)
        self._inference_time = self._histogram("request_inference_time_seconds", "Row to finish", LATENCY_BUCKETS)
        self._request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens", TOKENS_BUCKETS)
        self._request_computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that the prefix cache did not hold", TOKENS_BUCKETS
        )
        self._request_generation_tokens = self._histogram("request_generation_tokens", "Tokens written", TOKENS_BUCKETS)
        self._request_max_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest answer", TOKENS_BUCKETS
        )
        self._request_n = self._histogram("request_params_n", "Answers asked for", (1, 2, 5, 10, 20))
        self._request_max_tokens = self._histogram("request_params_max_tokens", "max_tokens asked for", TOKENS_BUCKETS)
        self._iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens prefilled and committed in a step", TOKENS_BUCKETS
        )

    def observe_round(self, num_drafted: int, num_accepted: int, num_committed: int) -> None:
        """Count one row-round; the meaning of the counts is that of `AcceptanceStats`."""
        with self._lock:
            self._acceptance.observe(num_drafted, num_accepted, num_committed)
            self._generation_tokens.inc(num_committed)
            if num_drafted:
                self._num_drafts.inc()
                self._num_draft_tokens.inc(num_drafted)
                self._num_accepted_tokens.inc(num_accepted)
                for counter in self._per_position[:num_accepted]:
                    counter.inc()

    def observe_prompt(self, num_prompt_tokens: int, num_cached_tokens: int | None = None) -> None:
        """Count a prompt whose prefill is done; num_cached_tokens: those found in the cache, None: not looked up."""
        with self._lock:
            self._prompt_tokens.inc(num_prompt_tokens)
            self._request_prompt_tokens.observe(num_prompt_tokens)
            self._request_computed_tokens.observe(num_prompt_tokens - (num_cached_tokens or 0))
            if num_cached_tokens is not None:
                self._prefix_queries.inc(num_prompt_tokens)
                self._prefix_hits.inc(num_cached_tokens)

    def observe_preemptions(self, num_sequences: int) -> None:
        """Count answers that lost their pages and wait for others."""
        with self._lock:
            self._preemptions.inc(num_sequences)

    def observe_step(self, num_tokens: int) -> None:
        """Count one step of the engine, and the tokens that it prefilled and committed."""
        with self._lock:
            self._iteration_tokens.observe(num_tokens)

    def observe_gap(self, seconds: float) -> None:
        """Count the wait between tokens of one answer; those that come together are one wait."""
        with self._lock:
            self._inter_token.observe(seconds)

    def observe_request(self, n: int, max_tokens: int | None, max_output_tokens: int) -> None:
        """Count a request that ended: what it asked for, and the tokens of its longest answer."""
        with self._lock:
            self._request_n.observe(n)
            if max_tokens is not None:
                self._request_max_tokens.observe(max_tokens)
            self._request_max_generation_tokens.observe(max_output_tokens)

    def observe_finish(
        self,
        reason: str,
        latency_s: float,
        first_token_s: float | None = None,
        num_output_tokens: int = 0,
        scheduled_s: float | None = None,
    ) -> None:
        """Count an answer that ended: "stop", "length" or "abort".

        latency_s, first_token_s, scheduled_s: until its end, its first token and its row; None where it never came.
        """
        with self._lock:
            self._request_success.labels(**self._names, finished_reason=reason).inc()
            self._latency.observe(latency_s)
            self._request_generation_tokens.observe(num_output_tokens)
            self._queue_time.observe(latency_s if scheduled_s is None else scheduled_s)
            if scheduled_s is not None:
                self._inference_time.observe(latency_s - scheduled_s)
            if first_token_s is not None:
                self._first_token.observe(first_token_s)
                self._decode_time.observe(latency_s - first_token_s)
                if scheduled_s is not None:
                    self._prefill_time.observe(first_token_s - scheduled_s)
                if num_output_tokens > 1:
                    per_token_s = (latency_s - first_token_s) / (num_output_tokens - 1)
                    self._per_token.observe(per_token_s)
                    self._request_per_token.observe(per_token_s)

    def set_load(self, num_running: int, num_waiting: int, cache_usage: float) -> None:
        """State the present load; cache_usage is a share of the pages, 0 to 1."""
        with self._lock:
            self._num_running.set(num_running)
            self._num_waiting.set(num_waiting)
            self._cache_usage.set(cache_usage)

    def set_compiles_after_ready(self, num_compiles: int) -> None:
        """State how many programs were compiled since the engine was ready; more than 0 is a fault."""
        with self._lock:
            self._compiles.set(num_compiles)

    def acceptance(self) -> AcceptanceStats:
        """A copy of the acceptance counts so far."""
        with self._lock:
            return copy.deepcopy(self._acceptance)

    def snapshot(self) -> dict[str, Any]:
        """Every counter and gauge by name, labels left out; per-position counts as a list."""
        with self._lock:
            values: dict[str, Any] = {}
            for family in self._registry.collect():
                if family.type == "histogram":
                    continue
                samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                if family.name.endswith("_per_pos"):
                    values[family.name] = [int(sample.value) for sample in samples]
                elif family.name.endswith("request_success"):
                    values[family.name] = {s.labels["finished_reason"]: int(s.value) for s in samples}
                else:
                    values[family.name] = samples[0].value
            return values

    def render(self) -> bytes:
        """The Prometheus text of all of it."""
        with self._lock:
            return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str):
        return Counter(f"vllm:{name}", help_text, LABELS, registry=self._registry).labels(**self._names)

    def _gauge(self, name: str, help_text: str):
        return Gauge(name, help_text, LABELS, registry=self._registry).labels(**self._names)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]):
        return Histogram(f"vllm:{name}", help_text, LABELS, buckets=buckets, registry=self._registry).labels(
            **self._names
        )
