"""Host. The offline bench: what it reads, how it averages, and that its last line is the JSON promised."""

import json
import math

import pytest

from jaxspec.bench import clock, offline
from jaxspec.bench.__main__ import main
from jaxspec.bench.prompts import default_prompts_path, read_prompts
from jaxspec.errors import ConfigError

PROMISED = {
    "plain_tokens_per_s", "spec_tokens_per_s", "speedup", "mean_acceptance_length", "tokens_per_round",
    "acceptance_per_position", "prefill_ms", "round_ms", "draft_ms", "verify_ms", "reject_ms", "plain_step_ms",
    "bandwidth_floor_ms", "host_share", "compiles_after_ready", "peak_rss_bytes", "device", "by_kind",
}  # fmt: skip


class WordTokenizer:
    """A word is a token: its length."""

    def encode(self, text, add_special_tokens=True):
        return [len(word) for word in text.split()]

    def apply_chat_template(self, messages, add_generation_prompt=True):
        return " ".join(message["content"] for message in messages)


def test_harmonic_mean_is_the_speedup_of_equal_plain_times():
    # Two kinds of one second each, sped up 2 and 4 times, together take 0.75 s.
    assert math.isclose(clock.harmonic_mean([2.0, 4.0]), 2 / 0.75)


def test_prompts_are_grouped_by_kind(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "a", "kind": "x", "prompt": "one two", "max_tokens": 3},
        {"kind": "y", "messages": [{"role": "user", "content": "three"}], "max_tokens": 4},
        {"kind": "x", "prompt": "four", "max_tokens": 5},
    ]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    kinds = read_prompts(path, WordTokenizer())
    assert [(one.name, one.token_ids, one.max_tokens) for one in kinds["x"]] == [("a", [3, 3], 3), ("5", [4], 5)]
    assert [one.token_ids for one in kinds["y"]] == [[5]]


@pytest.mark.parametrize(
    "text",
    ["", "not json", "[]", '{"prompt": "x"}', '{"prompt": "", "max_tokens": 3}', '{"prompt": "x", "max_tokens": 0}',
     '{"max_tokens": 3}', '{"prompt": "x", "max_tokens": "3"}'],
)  # fmt: skip
def test_a_line_that_is_no_prompt_is_named(tmp_path, text):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="prompt"):
        read_prompts(path, WordTokenizer())


def test_the_prompts_that_ship_are_six_kinds_of_two():
    kinds = read_prompts(default_prompts_path(), WordTokenizer())
    assert {kind: len(prompts) for kind, prompts in kinds.items()} == dict.fromkeys(
        ("chat", "summary", "code", "json", "edit", "story"), 2
    )


@pytest.mark.parametrize("words", [["--speculative-config", "{"], ["--speculative-config", "[]"]])
def test_a_wrong_config_exits_with_2(words, capsys):
    assert offline.main(words) == 2
    assert "jaxspec bench" in capsys.readouterr().err


@pytest.mark.heavy
def test_the_last_line_is_the_json_promised(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    repeat = "Say it again: the cat sat on the mat, the cat sat on the mat, the cat sat on the mat, the cat sat"
    path.write_text(
        "\n".join(json.dumps({"kind": kind, "prompt": repeat, "max_tokens": 12}) for kind in ("easy", "same"))
    )
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    words = ["offline", "--prompts", str(path), "--pairs", "1", "--speculative-config", json.dumps(config)]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report.keys() >= PROMISED
    assert report["compiles_after_ready"] == 0
    assert report["by_kind"].keys() == {"easy", "same"}
    for row in report["by_kind"].values():
        assert row.keys() >= {"speedup", "mean_acceptance_length", "tokens_per_round"}
        # The model goes on repeating, and n-gram lookup copies: more than one token a round.
        assert row["tokens_per_round"] > 1.5
        assert 1.5 < row["mean_acceptance_length"] <= 4
    assert len(report["acceptance_per_position"]) == 3
    assert all(
        report[key] > 0 for key in ("prefill_ms", "round_ms", "draft_ms", "verify_ms", "reject_ms", "plain_step_ms")
    )
    assert report["host_share"] < 1
