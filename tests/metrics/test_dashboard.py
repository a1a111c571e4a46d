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
    metrics.observe_prompt(5)
    metrics.observe_round(2, 1, 2)
    metrics.observe_finish("stop", 2.0, 0.5, 4)
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
    assert there["vllm:request_prompt_tokens_sum"] == 5
    assert there["vllm:request_generation_tokens_sum"] == 4
    assert there["vllm:request_decode_time_seconds_sum"] == 1.5
    assert there["vllm:request_time_per_output_token_seconds_sum"] == 0.5
    assert there["vllm:time_per_output_token_seconds_sum"] == 0.5
