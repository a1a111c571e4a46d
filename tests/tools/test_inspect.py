"""Host. `jaxspec inspect`: every kind of checkpoint is named, and what would be refused is refused with the reason."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.tools.inspect import inspect, main
from tests.oracle.folders import TINY, add_tokenizer

DRAFTERS = {
    "eagle1": "eagle", "eagle1-fcbias": "eagle", "eagle3": "eagle3", "eagle3-speculators": "eagle3",
    "medusa": "medusa", "mlp-speculator": "mlp_speculator", "mlp-speculator-tied": "mlp_speculator", "dflash": "dflash",
}  # fmt: skip


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters(name):
    found = inspect(str(TINY / name))
    assert found["drafter"] == DRAFTERS[name]
    assert repr(DRAFTERS[name]) in found["loads_as"]
    # Methods that are not built yet are refused as the engine would refuse them, by name.
    assert found["refused_because"] is None or DRAFTERS[name] in found["refused_because"]
    assert found["format"] == ("torch" if name.startswith(("eagle1", "medusa")) or name == "eagle3" else "safetensors")


def test_a_target(tmp_path):
    folder = add_tokenizer(shutil.copytree(TINY / "llama31", tmp_path / "x"))
    arrays = load_file(folder / "model.safetensors")
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(arrays | {buffer: np.ones(6, np.float32)}, folder / "model.safetensors")
    found = inspect(str(folder))
    assert found["family"] == "llama"
    assert found["num_parameters"] == sum(array.size for array in arrays.values()) + 6
    assert found["values_by_dtype"] == {"float32": found["num_parameters"]}
    assert found["num_bytes"] == (folder / "model.safetensors").stat().st_size
    assert found["ignored"] == [buffer]
    assert found["tokenizer"]["has_chat_template"]
    assert "target model, 3 layers, vocabulary 128, dtype float32" in found["loads_as"]
    assert (found["drafter"], found["refused_because"]) == (None, None)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": 4}, ["missing", "model.layers.3"]),
        ({"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}, ["qwen3_next", "rewind"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["awq"]),
    ],
)
def test_refusals(config, words, tmp_path, capsys):
    folder = shutil.copytree(TINY / "llama", tmp_path / "x")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    assert main([str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert all(word in found["refused_because"] for word in words)
    assert main([str(folder)]) == 1
    told = capsys.readouterr().out
    assert "because" in told
    assert all(word in told for word in words)


def test_places_without_a_checkpoint(tmp_path, capsys):
    assert main([str(tmp_path), "--json"]) == 1
    assert "no config.json" in json.loads(capsys.readouterr().out)["refused_because"]
    assert main([str(tmp_path / "absent.gguf")]) == 1
    assert "refused because" in capsys.readouterr().out


def test_people_and_programs_are_told_the_same(capsys):
    assert main([str(TINY / "qwen3-bf16")]) == 0
    told = capsys.readouterr().out
    assert main([str(TINY / "qwen3-bf16"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loads_as"] in told
    assert found["path"] in told
    assert "bfloat16" in told
    assert "prompts must be token ids" in told
