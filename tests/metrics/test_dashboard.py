"""Host. The Grafana dashboard asks for series that a scrape has, under the labels that they have."""

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from jaxspec.metrics.prometheus import EngineMetrics

DASHBOARD = Path(__file__).resolve().parents[2] / "configs" / "grafana.json"
SERIES = re.compile(r"(?:vllm|jaxspec):\w+")


def scraped():
    """Every series of a server that has served, by name, with its labels' names."""
    metrics = EngineMetrics("m", 2)
    metrics.observe_prompt(5, 2)
    metrics.observe_step(7)
    metrics.observe_gap(0.25)
    metrics.observe_request(1, 64, 4)
    metrics.observe_round(2, 1, 2)
    metrics.observe_finish("stop", 2.0, 0.5, 4, scheduled_s=0.125)
    metrics.set_load(1, 2, 0.5)
    metrics.set_compiles_after_ready(0)
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name: (set(sample.labels), sample.value) for family in families for sample in family.samples}


def test_the_dashboard_asks_for_what_is_there():
    there = scraped()
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 10
    for panel in panels:
        for target in panel["targets"]:
            names = SERIES.findall(target["expr"])
            assert names, panel["title"]
            for name in names:
                assert name in there, (panel["title"], name)
                assert "model_name" in there[name][0]
    asked = set(SERIES.findall(DASHBOARD.read_text(encoding="utf-8")))
    assert {name for name in there if "spec_decode" in name and not name.endswith("_created")} <= asked


def test_a_finished_request_is_in_every_histogram():
    there = {name: value for name, (_, value) in scraped().items()}
    sums = {
        "request_prompt_tokens": 5, "request_generation_tokens": 4, "request_prefill_kv_computed_tokens": 3,
        "request_max_num_generation_tokens": 4, "request_params_n": 1, "request_params_max_tokens": 64,
        "iteration_tokens_total": 7, "inter_token_latency_seconds": 0.25, "time_to_first_token_seconds": 0.5,
        "e2e_request_latency_seconds": 2.0, "request_queue_time_seconds": 0.125,
        "request_prefill_time_seconds": 0.375, "request_decode_time_seconds": 1.5,
        "request_inference_time_seconds": 1.875, "request_time_per_output_token_seconds": 0.5,
        "time_per_output_token_seconds": 0.5,
    }  # fmt: skip
    assert {name: there[f"vllm:{name}_sum"] for name in sums} == sums
    counts = {name: value for name, value in there.items() if name.endswith("_count")}
    assert counts == {f"vllm:{name}_count": 1 for name in sums}


def test_what_never_had_a_row_waited_all_its_time():
    metrics = EngineMetrics("m", 2)
    metrics.observe_finish("abort", 3.0)
    families = text_string_to_metric_families(metrics.render().decode())
    there = {sample.name: sample.value for family in families for sample in family.samples}
    assert there["vllm:request_queue_time_seconds_sum"] == there["vllm:e2e_request_latency_seconds_sum"] == 3.0
    none = ("request_prefill_time", "request_decode_time", "request_inference_time", "time_to_first_token")
    assert [there[f"vllm:{name}_seconds_count"] for name in none] == [0] * 4
