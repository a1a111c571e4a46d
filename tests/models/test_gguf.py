"""Device. Golden checkpoints as GGUF files: every architecture that llama.cpp and this package share."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.models.gguf_files import write_gguf
from tests.models.paging import Pager
from tests.oracle.folders import TINY, write_folder
from tests.oracle.goldens import assert_close, read_golden
from tests.oracle.llama import NumpyLlama
from tests.quick import heavy_but

FILES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3-longrope": "phi3",
    "gemma2": "gemma2",
    "gemma3-text": "gemma3",
    "gpt2": "gpt2",
    "mixtral": "llama",
    "qwen3-moe": "qwen3moe",
    "deepseek-v3-mtp": "deepseek2",
    "glm4-moe-mtp": "glm4moe",
    "ernie4-5-moe": "ernie4_5-moe",
}


@pytest.mark.parametrize("name", heavy_but(FILES, lambda name: name in ("llama31", "gemma3-text", "deepseek-v3-mtp")))
def test_the_same_model_as_a_gguf_file(tmp_path, name):
    expected = read_golden(name)
    path = write_gguf(tmp_path / "model.gguf", TINY / name, FILES[name])
    rows = Pager(path, num_rows=2, max_len=24, page_size=8).feed(expected["input_ids"].tolist())
    for (_, logits), wanted in zip(rows, expected["logits"], strict=True):
        assert_close(logits, wanted)


def test_biases_of_attention_are_permuted_too(tmp_path):
    config = json.loads((TINY / "llama" / "config.json").read_text()) | {"attention_bias": True}
    weights = load_file(TINY / "llama" / "model.safetensors")
    rng = np.random.default_rng(3)
    for name in [name for name in weights if "self_attn" in name]:
        weights[name.replace(".weight", ".bias")] = rng.standard_normal(len(weights[name])).astype(np.float32) * 0.3
    folder = write_folder(tmp_path / "biased", config, weights)
    path = write_gguf(tmp_path / "model.gguf", folder, "llama")
    ids = rng.integers(0, 128, (1, 20)).tolist()
    ((_, logits),) = Pager(path, num_rows=1, max_len=20, page_size=4).feed(ids)
    assert_close(logits, NumpyLlama(folder).logits(ids)[0])
