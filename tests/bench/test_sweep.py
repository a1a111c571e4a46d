"""Host. The sweep's configs, table and pictures, and whom `jaxspec tune` lets win: over made-up figures."""

import argparse
import json
import sys

import pytest
import yaml

from jaxspec.bench import sweep, tune
from jaxspec.bench.prompts import BenchPrompt
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculative import SpeculativeConfig
from jaxspec.errors import ConfigError


def args(*words):
    parser = argparse.ArgumentParser()
    sweep.add_flags(parser)
    return parser.parse_args(words)


def test_every_method_with_every_number_of_drafts():
    words = ["--methods", "ngram", "draft_model", "self", "--num-speculative-tokens", "2", "auto"]
    more = {"model": "d", "prompt_lookup_max": 3, "draft_sample_method": "probabilistic"}
    configs = sweep.candidates(args(*words, "--speculative-config", json.dumps(more)))
    read = {
        "ngram": {"prompt_lookup_max": 3},
        "draft_model": {"model": "d", "draft_sample_method": "probabilistic"},
        "self": {"draft_sample_method": "probabilistic"},
    }
    assert configs == [
        {"method": method, "num_speculative_tokens": number} | more
        for method, more in read.items()
        for number in (2, "auto")
    ]
    for config in configs:
        SpeculativeConfig.model_validate(config)


@pytest.mark.parametrize(
    "words",
    [("--num-speculative-tokens", "some"), ("--batch", "0"), ("--pairs", "0"), ("--speculative-config", "[]")],
)
def test_flags_that_make_no_config(words):
    with pytest.raises(ConfigError):
        sweep.candidates(args(*words))


@pytest.mark.parametrize(("batch", "names"), [(1, "ab"), (2, "ab"), (3, "abab"), (8, "abababab")])
def test_few_prompts_are_asked_again_to_fill_a_batch(batch, names):
    prompts = [BenchPrompt(name, "x", [1], 1) for name in "ab"]
    assert "".join(one.name for one in sweep.filled(prompts, batch)) == names


def run_of(number, batch, speedup, least=None):
    return {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": number},
        "batch": batch,
        "speedup": speedup,
        "speedup_min": least or speedup,
        "tokens_per_s": 30 * speedup * batch,
        "by_kind": {"chat": speedup, "code": speedup + 1},
    }


def report_of(*runs):
    return {"model": "m", "prompts": "p.jsonl", "device": "cpu", "pairs": 3, "plain": {"1": 30.0, "8": 90.0},
            "runs": list(runs)}  # fmt: skip


REPORT = report_of(run_of(4, 1, 3.0), run_of(4, 8, 0.9), run_of("auto", 1, 2.0), run_of("auto", 8, 1.5))


def test_the_winner_is_best_over_all_batch_sizes_as_times_are():
    # 2 / (1/3 + 1/0.9) = 1.38; 2 / (1/2 + 1/1.5) = 1.71
    speedup, config = tune.best(REPORT)
    assert speedup == pytest.approx(12 / 7)
    assert config == {"method": "ngram", "num_speculative_tokens": "auto"}


@pytest.mark.parametrize("run", [run_of(4, 1, 1.01), run_of(4, 1, 1.3, least=0.9)])
def test_plain_decoding_wins_where_nothing_is_surely_faster(run):
    assert tune.best(report_of(run)) == (1.0, None)


@pytest.mark.parametrize("config", [{"method": "ngram", "num_speculative_tokens": "auto"}, None])
def test_the_file_is_a_config(config):
    text = tune.document(REPORT, 1.5, config)
    parsed = EngineConfig.model_validate(yaml.safe_load(text))
    assert parsed.model == "m"
    assert (parsed.speculative_config is None) == (config is None)
    assert "1.50 times" in text


def test_the_command_writes_the_winner(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "run", lambda args: REPORT)
    path = tmp_path / "tuned.yaml"
    assert tune.main(["--output", str(path)]) == 0
    assert yaml.safe_load(path.read_text())["speculative_config"]["num_speculative_tokens"] == "auto"
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["best_speedup"] == pytest.approx(12 / 7)
    assert any(line.split() == ["ngram", "4", "3.00", "0.90"] for line in lines)


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    paths = sweep.draw(REPORT, tmp_path / "plots")
    assert [path.rsplit("/", 1)[1] for path in paths] == ["speed.png", "kinds-1.png", "kinds-8.png"]
    for path in paths:
        with open(path, "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"


def test_pictures_without_matplotlib_are_refused_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert sweep.main(["--plots", str(tmp_path)]) == 2
    assert "matplotlib" in capsys.readouterr().err
