"""Host. Acceptance figures by hand, their zero cases, and the Prometheus view of the same rounds."""

import math
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxspec.metrics.acceptance import AcceptanceStats, log_line
from jaxspec.metrics.prometheus import EngineMetrics

# (drafted, accepted, committed): a draftless round, a cut block, a full one, rejections.
ROUNDS = [(0, 0, 1), (3, 3, 4), (3, 3, 2), (3, 1, 2), (2, 0, 1), (1, 1, 2)]


def counted(rounds, num_spec_tokens=3):
    stats = AcceptanceStats(num_spec_tokens)
    for one in rounds:
        stats.observe(*one)
    return stats


def test_the_definitions_by_hand():
    stats = counted(ROUNDS)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (5, 12, 8)
    assert stats.mean_acceptance_length == 1 + 8 / 5
    assert stats.draft_acceptance_rate == 8 / 12
    assert stats.num_accepted_per_position == [4, 2, 2]
    assert stats.acceptance_per_position == [4 / 5, 2 / 5, 2 / 5]
    assert stats.tokens_per_round == 12 / 6
    assert stats.histogram == [1, 2, 0, 2]


@pytest.mark.parametrize("rounds", [[], [(0, 0, 1)]])
def test_no_drafts_give_zero_not_nan(rounds):
    stats = counted(rounds)
    figures = stats.as_dict()
    assert all(math.isfinite(value) for value in figures.values() if not isinstance(value, list))
    assert (figures["mean_acceptance_length"], figures["draft_acceptance_rate"]) == (0.0, 0.0)
    assert stats.acceptance_per_position == [0.0, 0.0, 0.0]
    assert "Mean acceptance length: 0.00" in log_line(stats, AcceptanceStats(3), 0.0)


def test_the_dict_has_the_keys_that_clients_read_and_comes_back():
    stats = counted(ROUNDS)
    figures = stats.as_dict()
    assert set(figures) >= {
        "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps",
        "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens",
    }  # fmt: skip
    assert figures["num_spec_steps"] == 5
    assert AcceptanceStats.from_dict(figures).as_dict() == figures


def test_merging_is_counting_together():
    first, second = counted(ROUNDS[:3]), counted(ROUNDS[3:])
    first.merge(second)
    assert first.as_dict() == counted(ROUNDS).as_dict()
    short = counted([(1, 1, 2)], num_spec_tokens=1)
    short.merge(counted(ROUNDS))
    assert short.num_accepted_tokens == 9
    assert short.num_spec_tokens == 3


@pytest.mark.parametrize("impossible", [(1, 2, 1), (4, 0, 1), (-1, -1, 1)])
def test_impossible_rounds_are_refused(impossible):
    with pytest.raises(ValueError, match="must hold in every round"):
        AcceptanceStats(3).observe(*impossible)


def test_the_log_line_covers_its_window_only():
    line = log_line(counted(ROUNDS), counted(ROUNDS[:2]), 2.0)
    assert line == (
        "SpecDecoding metrics: Mean acceptance length: 2.25, Accepted throughput: 2.50 tokens/s, "
        "Drafted throughput: 4.50 tokens/s, Accepted: 5 tokens, Drafted: 9 tokens, "
        "Per-position acceptance rate: 0.750, 0.250, 0.250, Avg Draft acceptance rate: 55.6%"
    )


def scraped(metrics):
    """(sample name, remaining label or None) -> value."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            assert {"model_name": "m", "engine": "0"}.items() <= sample.labels.items()
            found[sample.name, *labels.values()] = sample.value
    return found


def test_a_scrape_shows_vllm_s_names():
    metrics = EngineMetrics("m", num_spec_tokens=3)
    before = scraped(metrics)
    assert before["vllm:spec_decode_num_drafts_total",] == 0
    assert before["vllm:spec_decode_num_accepted_tokens_per_pos_total", "2"] == 0
    for one in ROUNDS:
        metrics.observe_round(*one)
    metrics.observe_prompt(7)
    metrics.set_load(2, 1, 0.25)
    metrics.observe_finish("stop", latency_s=3.0, first_token_s=1.0, num_output_tokens=5)
    metrics.observe_finish("abort", latency_s=1.0)
    after = scraped(metrics)
    expected = {
        ("vllm:spec_decode_num_drafts_total",): 5, ("vllm:spec_decode_num_draft_tokens_total",): 12,
        ("vllm:spec_decode_num_accepted_tokens_total",): 8,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"): 4,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"): 2,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "2"): 2,
        ("vllm:prompt_tokens_total",): 7, ("vllm:generation_tokens_total",): 12,
        ("vllm:num_requests_running",): 2, ("vllm:num_requests_waiting",): 1, ("vllm:kv_cache_usage_perc",): 0.25,
        ("vllm:request_success_total", "stop"): 1, ("vllm:request_success_total", "abort"): 1,
        ("vllm:time_to_first_token_seconds_count",): 1, ("vllm:time_to_first_token_seconds_sum",): 1.0,
        ("vllm:time_per_output_token_seconds_sum",): 0.5, ("vllm:e2e_request_latency_seconds_count",): 2,
        ("jaxspec:compiles_after_ready",): 0,
    }  # fmt: skip
    assert {name: after[name] for name in expected} == expected
    assert metrics.snapshot()["vllm:spec_decode_num_accepted_tokens_per_pos"] == [4, 2, 2]
    assert metrics.snapshot()["vllm:request_success"] == {"stop": 1, "abort": 1}
    assert metrics.snapshot()["vllm:prompt_tokens"] == 7
    assert metrics.acceptance().as_dict() == counted(ROUNDS).as_dict()


def test_a_scrape_is_a_snapshot_and_counters_never_fall():
    metrics = EngineMetrics("m", num_spec_tokens=3)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            metrics.observe_round(3, 3, 4)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        last = 0.0
        for _ in range(50):
            seen = metrics.snapshot()
            assert seen["vllm:spec_decode_num_accepted_tokens"] == seen["vllm:spec_decode_num_draft_tokens"]
            assert seen["vllm:spec_decode_num_draft_tokens"] >= last
            last = seen["vllm:spec_decode_num_draft_tokens"]
    finally:
        stop.set()
        writer.join()
    assert last > 0


def test_two_engines_share_nothing():
    first, second = EngineMetrics("m", 1), EngineMetrics("m", 1)
    first.observe_round(1, 1, 2)
    assert second.acceptance().num_drafts == 0
    assert second.snapshot()["vllm:generation_tokens"] == 0
