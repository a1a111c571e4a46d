"""Host. What fits, the lines through compiled figures, the report for people and machines, and its page."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from jaxspec.aot import command
from jaxspec.aot.compiling import collectives, compile_in_child
from jaxspec.aot.memory import Fit
from jaxspec.aot.page import line_picture
from jaxspec.aot.report import (
    acceptance_lengths,
    extrapolated,
    fewest_devices,
    fit_of,
    paper_of,
    report_of,
    text_of,
)
from jaxspec.aot.topology import topology_of
from jaxspec.errors import ConfigError
from tests.aot.paper import CONFIGS, MODELS, SHIPPED, on_paper

FIT = Fit(
    memory_bytes=1000, plan_bytes=900, target_bytes=300, draft_bytes=100, table_bytes=40, temp_bytes=60,
    is_compiled=True, page_bytes=8, block_size=4, max_num_seqs=10, wanted_pages=100,
)  # fmt: skip


def paper(name, topology, num_devices=1, **more):
    config, described, _ = on_paper(name, topology, tensor_parallel_size=num_devices, **more)
    return config, paper_of(config, described, topology_of(topology))


def test_what_fits_by_hand():
    assert (FIT.free_bytes, FIT.pages) == (400, 50)
    assert FIT.fits(200)
    assert not FIT.fits(201)
    assert FIT.fits(20, rows=10)
    assert not FIT.fits(21, rows=10)
    # Each row brings a tenth of tables and temporaries, and three pages for ten tokens.
    assert FIT.largest_batch(10) == (900 - 400) // (3 * 8 + 10) == 14
    assert FIT.longest_context(10) == (500 - 100) // (10 * 8) * 4 == 20
    assert FIT.longest_context(60) == 0


def test_a_config_on_paper_by_hand():
    config, found = paper("llama3.1-8b-eagle3", "h100:1")
    fit = fit_of(found, config)
    assert fit.plan_bytes == int(84942979072 * 0.9)
    assert fit.page_bytes == 16 * (131_072 + 4096)  # the target's and the head's
    assert fit.wanted_pages == 64 * 8192 // 16
    seen = 65 * 5 * 3 * 4096 * 4  # of each row, J states of three streams in float32
    history = 65 * 8192 * 4
    assert fit.table_bytes >= seen + history
    assert fit.table_bytes < 1.5 * (seen + history)


def test_experts_take_room_on_gpus():
    """What was compiled for 16 H200s, with chunks of 2048 tokens and of 128, took 60.551 and 3.799 GB."""
    for tokens, compiled in ((2048, 60.551e9), (128, 3.799e9)):
        config, found = paper("deepseek-v3-mtp", "h200:2x8", 16, max_num_batched_tokens=tokens, max_num_seqs=1)
        assert fit_of(found, config).temp_bytes == pytest.approx(compiled, rel=0.05)
    config, found = paper("deepseek-v3-mtp", "v5p:4x4x4", 16, max_num_batched_tokens=2048, max_num_seqs=1)
    assert fit_of(found, config).temp_bytes < 3e9


def test_compiled_temporaries_go_before_the_estimate():
    config, found = paper("llama3.1-8b-eagle3", "h100:1")
    assert not fit_of(found, config).is_compiled
    told = fit_of(found, config, 12345)
    assert (told.temp_bytes, told.is_compiled) == (12345, True)


def test_a_model_is_spread_over_as_few_devices_as_hold_it():
    found = {}
    for name, topology in (("llama3.1-8b-eagle3", "h100:8"), ("llama3.1-70b-draft", "h100:8"),
                           ("qwen3-30b-a3b", "v6e:2x4"), ("deepseek-v3-mtp", "h200:2x8"),
                           ("deepseek-v3-mtp", "h100:8")):  # fmt: skip
        config, described, _ = on_paper(name, topology)
        paper = fewest_devices(config, described, topology_of(topology), 4096)
        found[name, topology] = paper.num_devices, fit_of(paper, config).fits(4096)
    assert found == {
        ("llama3.1-8b-eagle3", "h100:8"): (1, True),
        ("llama3.1-70b-draft", "h100:8"): (4, True),
        ("qwen3-30b-a3b", "v6e:2x4"): (4, True),  # two hold the weights, and nearly nothing else
        ("deepseek-v3-mtp", "h200:2x8"): (16, True),
        ("deepseek-v3-mtp", "h100:8"): (8, False),
    }


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="must not exceed the 8 devices"):
        paper("llama3.1-70b-draft", "h100:8", 16)
    with pytest.raises(ConfigError, match="data_parallel_size=3 must not exceed the 8 devices"):
        paper("llama3.1-70b-draft", "h100:8", 4, data_parallel_size=3)


def test_groups_are_copies_each_with_its_rows_and_pages():
    (config, alone), (_, groups) = (paper("llama3.1-70b-draft", "h100:8", 4, data_parallel_size=n) for n in (1, 2))
    assert fit_of(groups, config) == fit_of(alone, config)
    reports = [report_of(one, config, context=1024, lengths=[2.5]) for one in (alone, groups)]
    assert [(one["replicas"], one["data"]) for one in reports] == [(2, 1), (2, 2)]
    assert [one | {"data": 0} for one in reports] == [reports[0] | {"data": 0}] * 2
    assert "2 copies of the model over 4 devices each, 2 of them in one engine" in text_of(reports[1])
    # No room for a group over eight devices beside another one.
    config, described, _ = on_paper("deepseek-v3-mtp", "h100:8", data_parallel_size=2)
    assert fewest_devices(config, described, topology_of("h100:8"), 4096).num_devices == 4


def test_speed_is_tokens_over_seconds():
    config, found = paper("llama3.1-8b-eagle3", "h100:1")
    report = report_of(found, config, context=1024, lengths=[2.5])
    one = next(row for row in report["speeds"] if row["batch"] == 8)
    at = one["at_acceptance_length"]["2.5"]
    assert one["plain_tokens_per_s_per_chip"] == pytest.approx(8 / (one["plain_ms"] / 1e3))
    assert at["tokens_per_s_per_chip"] == pytest.approx(8 * 2.5 / (one["round_ms"] / 1e3))
    assert at["speedup"] == pytest.approx(at["tokens_per_s_per_chip"] / one["plain_tokens_per_s_per_chip"])
    assert at["speedup"] == pytest.approx(2.5 / one["breakeven_acceptance_length"])
    # Memory-bound: the time of a step is that of reading its bytes.
    assert one["plain_ms"] / 1e3 == pytest.approx(one["plain_bytes"] / found.topology.chip.memory_bandwidth)


def test_speed_of_several_devices_is_a_chips():
    config, found = paper("llama3.1-70b-draft", "h100:8", 8)
    one = report_of(found, config, context=1024, lengths=[])["speeds"][0]
    assert one["plain_tokens_per_s_per_chip"] == pytest.approx(1 / 8 / (one["plain_ms"] / 1e3))
    # Two devices make a chip of TPU7x.
    config, found = paper("llama3.1-8b-eagle3", "tpu7x:1", 2)
    one = report_of(found, config, context=1024, lengths=[])["speeds"][0]
    assert one["plain_tokens_per_s_per_chip"] == pytest.approx(1 / (one["plain_ms"] / 1e3))


def test_acceptance_lengths():
    assert acceptance_lengths(None, 4) == [1.5, 2.0, 2.5, 3.0]
    assert acceptance_lengths(None, 1) == [1.5, 2.0]
    assert acceptance_lengths(None, 0) == []
    assert acceptance_lengths([5.0], 4) == [5.0]
    for wrong in (5.1, 0.9):
        with pytest.raises(ConfigError, match="must be in \\[1, 5\\]"):
            acceptance_lengths([wrong], 4)


def test_a_line_through_what_was_compiled():
    programs = [
        {"name": "a", "layers": 2, "temp_bytes": 30},
        {"name": "a", "layers": 4, "temp_bytes": 50},
        {"name": "b", "layers": 2, "temp_bytes": 7},
        {"name": "c", "layers": 2, "error": "no"},
    ]
    assert extrapolated(programs, "temp_bytes", 32) == {"a": 330.0, "b": 7.0}


def test_collectives_are_read_from_the_text():
    text = """
  %all-reduce.3 = f32[8,4096]{1,0} all-reduce(f32[8,4096]{1,0} %dot.1), replica_groups={{0,1}}
  %x = (bf16[16]{0}, bf16[16]{0}) all-reduce-start(bf16[16]{0} %p), channel_id=2
  %g = s32[2,3]{1,0} all-gather(s32[1,3]{1,0} %q), dimensions={0}
  %fusion = f32[99]{0} fusion(f32[99]{0} %all-reduce.3), kind=kLoop
"""
    assert collectives(text) == {"all-reduce": [2, 8 * 4096 * 4 + 2 * 16 * 2], "all-gather": [1, 24]}


def test_what_cannot_be_compiled_here_says_what_to_install(monkeypatch):
    config, _, _ = on_paper("llama3.1-8b-eagle3")
    monkeypatch.setattr("jaxspec.aot.compiling.missing", lambda chip: "libtpu is not installed (the extra aot-tpu)")
    with pytest.raises(ConfigError, match=r"the extra aot-tpu.*or leave it out with --no-compile"):
        compile_in_child(config, [MODELS], topology_of("v5e:1"), 10)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_command_on_paper(name, capsys, tmp_path):
    page = tmp_path / "report.html"
    words = ["--config", str(CONFIGS / f"{name}.yaml"), "--topology", "h200:2x8", "--no-compile", "--json"]
    assert command.main([*words, "--html", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert report["fit"]["fits"]
    assert report["compiled"] is None
    assert "temporaries are an estimate: nothing was compiled" in report["notes"]
    assert f"{report['fit']['largest_batch']} of {report['context']} tokens" in "\n".join(lines)
    text = page.read_text()
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")  # it needs nothing else
    pictures = [ElementTree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)]
    lines_drawn = pictures[1].findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines_drawn) == 1 + len(report["speeds"][0]["at_acceptance_length"])


def test_what_does_not_fit_is_no_success(capsys):
    words = ["--config", str(CONFIGS / "deepseek-v3-mtp.yaml"), "--topology", "h100:8", "--no-compile"]
    assert command.main(words) == 1
    assert "it does not fit: not one request of 4096 tokens with tables for 64 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--topology", "v5:2x2"], "there is no chip 'v5'"),
        (["--topology", "h100:8", "--context", "9000"], "--context 9000 must be in [1, 8192]"),
        (["--topology", "h100:8", "--acceptance-length", "6"], "must be in [1, 5]"),
        (["--topology", "h100:8", "--tensor", "16"], "must not exceed the 8 devices"),
        (["--topology", "h100:8", "--tensor", "0"], "--tensor 0 must be 1 or more"),
        (["--topology", "h100:8", "--layers", "0"], "--layers 0 must be 1 or more"),
    ],
)
def test_wrong_words_are_refused(words, says, capsys):
    assert command.main(["--config", str(CONFIGS / "llama3.1-8b-eagle3.yaml"), "--no-compile", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_config_is_needed(capsys):
    assert command.main(["--topology", "h100:8"]) == 2
    assert "--config FILE is needed" in capsys.readouterr().err


def test_a_picture_has_every_point():
    drawn = ElementTree.fromstring(line_picture({"a": [(1, 10.0), (8, 30.0)], "b": [(2, 5.0)]}, "x", "y < z"))
    space = "{http://www.w3.org/2000/svg}"
    assert len(drawn.findall(f"{space}circle")) == 3
    first, last = drawn.find(f"{space}polyline").get("points").split(" ")
    # Three octaves to the right, and higher, which in SVG is less.
    assert float(first.split(",")[0]) < float(last.split(",")[0])
    assert float(first.split(",")[1]) > float(last.split(",")[1])
