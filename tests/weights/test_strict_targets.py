"""Host. Golden folders, mutated: each loads as it should, or fails with one error that names key and shape."""

import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.errors import JaxspecError, WeightsError
from jaxspec.models.registry import family_of
from jaxspec.weights.checkpoint import open_checkpoint
from jaxspec.weights.load import load


def load_folder(path):
    with open_checkpoint(path) as checkpoint:
        family = family_of(checkpoint.config.family)
        specs = family.specs(checkpoint.config, jnp.float32)
        return load(checkpoint.reader, specs, family.name_table(checkpoint.config, checkpoint.source))


@pytest.fixture
def mutate(tiny_goldens, tmp_path):
    """Copies a folder with changed config keys and tensors (a value of `...` removes)."""

    def run(name, config=(), tensors=()):
        folder = shutil.copytree(tiny_goldens / name, tmp_path / name)
        values = json.loads((folder / "config.json").read_text()) | dict(config)
        values = {key: value for key, value in values.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(values))
        arrays = load_file(folder / "model.safetensors") | dict(tensors)
        save_file({key: array for key, array in arrays.items() if array is not ...}, folder / "model.safetensors")
        return folder

    return run


@pytest.mark.parametrize("name", ["llama", "llama31", "llama-7layer", "mistral-swa", "qwen2", "qwen3", "qwen3-bf16"])
def test_golden_folders_load_whole(tiny_goldens, name):
    weights = load_folder(tiny_goldens / name)
    assert ("head" in weights) == (name in ("llama31", "llama-7layer", "mistral-swa"))
    assert all(bool(jnp.isfinite(array).all()) for array in (weights["embed"], weights["final_norm"]))


def zeros(*shape):
    return np.zeros(shape, np.float32)


Q, K = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize(
    ("name", "config", "tensors", "words"),
    [
        ("llama", {"num_hidden_layers": 4}, {}, ["missing", "model.layers.3.mlp.down_proj.weight", "[48, 64]"]),
        ("llama", {"num_hidden_layers": 2}, {}, ["unexpected", "model.layers.2.mlp.down_proj.weight [48, 64]"]),
        ("llama", {"hidden_size": 56}, {}, ["misshaped", "model.embed_tokens.weight [128, 48]", "[128, 56]"]),
        ("llama", {"intermediate_size": 65}, {}, ["misshaped", "mlp.gate_proj.weight [64, 48]", "[130, 48]"]),
        ("llama", {"vocab_size": 127}, {}, ["misshaped", "model.embed_tokens.weight [128, 48]", "[127, 48]"]),
        ("llama", {"num_key_value_heads": 4}, {}, ["misshaped", "k_proj.weight [24, 48]", "[144, 48]"]),
        ("llama", {"head_dim": 14}, {}, ["misshaped", "q_proj.weight [48, 48]", "o [48, 56]"]),
        ("llama", {"attention_bias": True}, {}, ["missing", "q_proj.bias", "o_proj.bias"]),
        ("llama", {}, {"extra.weight": zeros(3)}, ["unexpected", "extra.weight [3]"]),
        ("llama", {}, {f"{Q}.bias": zeros(48)}, ["unexpected", f"{Q}.bias [48]"]),
        ("llama", {}, {f"{Q}.weight": ...}, ["missing", f"{Q}.weight", "layers.1.qkv [96, 48]"]),
        ("llama", {}, {f"{Q}.weight": ..., "q.weight": zeros(48, 48)},
         ["missing", f"{Q}.weight", "unexpected", "q.weight [48, 48]"]),
        ("llama", {}, {f"{Q}.weight": zeros(24, 48), f"{K}.weight": zeros(48, 24)}, [f"{K}.weight [48, 24]"]),
        ("llama31", {}, {"model.norm.weight": np.zeros(48, np.int64)}, ["model.norm.weight [48] int64", "float32"]),
        ("qwen2", {}, {f"{Q}.bias": ...}, ["missing", f"{Q}.bias", "layers.1.qkv_bias"]),
        ("qwen2", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, {}, ["unexpected", f"{Q}.bias"]),
        ("qwen3", {}, {"model.layers.0.self_attn.q_norm.weight": zeros(10)}, ["q_norm.weight [10]", "[16]"]),
    ],
)  # fmt: skip
def test_mutations_fail_by_name(mutate, name, config, tensors, words):
    with pytest.raises(WeightsError) as caught:
        load_folder(mutate(name, config, tensors))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_head_that_is_missing_is_tied_and_old_buffers_may_stay(mutate):
    weights = load_folder(mutate("llama31", {}, {"lm_head.weight": ...}))
    assert "head" not in weights
    load_folder(mutate("llama", {}, {"model.layers.0.self_attn.rotary_emb.inv_freq": zeros(6)}))


def test_a_stored_head_gives_way_to_the_tie(mutate):
    weights = load_folder(mutate("llama", {}, {"lm_head.weight": zeros(128, 48)}))  # its config says tied
    assert "head" not in weights


def test_random_bytes_in_the_head_never_half_load_a_model(mutate):
    folder = mutate("llama")
    path = folder / "model.safetensors"
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    num_errors = 0
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[int(rng.integers(0, 1500))] = int(rng.integers(0, 256))
        path.write_bytes(damaged)
        try:
            load_folder(folder)
        except JaxspecError:
            num_errors += 1
    assert num_errors > 50


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("deepseek-v3-mtp", r"model\.layers\.3\."),
        ("glm4-moe-mtp", r"model\.layers\.2\."),
        ("qwen3-body-next-mtp", r"mtp\."),
        ("gpt2", r"attn\.(masked_)?bias"),
    ],
)
def test_what_a_target_leaves_to_its_drafter_is_said(tiny_goldens, caplog, name, pattern):
    with caplog.at_level("INFO", logger="jaxspec.weights.load"):
        load_folder(tiny_goldens / name)
    assert any("left unread" in line and re.search(pattern, line.replace("\\", "")) for line in caplog.messages)
