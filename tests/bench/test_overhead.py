"""Host. The bench of what HTTP costs: which prompts it takes, what it refuses, and a run over a tiny model."""

import json
import shutil

import pytest

from jaxspec.bench.overhead import in_turn, main, serving
from jaxspec.bench.prompts import BenchPrompt
from jaxspec.errors import ConfigError
from tests.serve.fake import letter_tokenizer
from tests.serve.test_real_engine import ALL_LETTERS, TINY


def test_kinds_take_turns():
    kinds = {kind: [BenchPrompt(f"{kind}{i}", kind, [1], 7) for i in range(n)] for kind, n in (("a", 3), ("b", 1))}
    assert [one.name for one in in_turn(kinds, 3, None)] == ["a0", "b0", "a1"]
    assert [one.name for one in in_turn(kinds, 6, None)] == ["a0", "b0", "a1", "a2", "a0", "b0"]
    assert {one.max_tokens for one in in_turn(kinds, 2, None)} == {7}
    assert {one.max_tokens for one in in_turn(kinds, 2, 5)} == {5}


def test_what_is_wrong_is_said(capsys, tmp_path):
    for words in (["--batch", "0"], ["--max-tokens", "0"], ["--speculative-config", "{"]):
        assert main(words) == 2
    assert main(["--model", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("jaxspec bench overhead: ") == 4


def test_a_server_that_does_not_start_says_why():
    with pytest.raises(ConfigError, match="max_num_seqs"), serving({"model": "m", "max_num_seqs": 0}):
        pass


@pytest.mark.heavy
def test_a_run(tmp_path, capsys):
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(TINY / name, tmp_path / name)
    letter_tokenizer(ALL_LETTERS).backend.save(str(tmp_path / "tokenizer.json"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text, "max_tokens": 9}) for text in ("abc", "the end")))
    words = ["--model", str(tmp_path), "--prompts", str(prompts), "--batch", "2", "--num-prompts", "3", "--pairs", "2"]
    assert main([*words, "--request-rate", "50"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["num_tokens"], report["failed"], report["chunks_per_token"]) == (27, 0, 1.0)
    assert 0 < report["ratio_min"] <= report["ratio"] <= report["ratio_max"]
    assert min(report[f"{side}_tokens_per_s"] for side in ("engine", "http")) > 0
    assert report["median_ttft_ms_loaded"] > 0
