"""Host. The one door to checkpoints: what counts as one, and damage met on the way in."""

import json
import shutil

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxspec.errors import ConfigError, JaxspecError, WeightsError
from jaxspec.weights.checkpoint import open_checkpoint

GOLDENS = ["llama", "llama31", "llama-7layer", "mistral-swa", "qwen2", "qwen3", "qwen3-bf16"]


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_folders(tiny_goldens, name):
    with open_checkpoint(tiny_goldens / name) as checkpoint:
        config, tensors = checkpoint.config, checkpoint.reader.tensors
        assert (checkpoint.source, checkpoint.path) == ("hf", tiny_goldens / name)
        assert tensors["model.embed_tokens.weight"].shape == (config.vocab_size, config.hidden_size)
        last = f"model.layers.{config.num_layers - 1}.self_attn"
        assert tensors[f"{last}.q_proj.weight"].shape == (config.num_heads * config.head_dim, config.hidden_size)
        assert tensors[f"{last}.k_proj.weight"].shape == (config.num_kv_heads * config.head_dim, config.hidden_size)
        assert config.tie_word_embeddings == ("lm_head.weight" not in tensors)
        assert (f"{last}.q_proj.bias" in tensors, f"{last}.q_norm.weight" in tensors) == (
            config.qkv_bias,
            config.qk_norm,
        )
        assert config.dtype == ("bfloat16" if name == "qwen3-bf16" else "float32")


@pytest.fixture
def folder(tiny_goldens, tmp_path):
    return shutil.copytree(tiny_goldens / "llama31", tmp_path / "llama31")


@pytest.fixture
def gguf_file(tmp_path):
    def write(extra=(), dtype=np.float32, **metadata):
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(8)
        writer.add_feed_forward_length(16)
        writer.add_head_count(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(5e5)
        for key, value in metadata.items():
            writer.add_uint32(key, value)
        for name, array in {"token_embd.weight": np.ones((12, 8), dtype), **dict(extra)}.items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def test_gguf_file_alone_or_in_a_folder(gguf_file):
    path = gguf_file(dtype=np.float16)
    for given in (path, str(path), path.parent):
        with open_checkpoint(given) as checkpoint:
            assert (checkpoint.source, checkpoint.path) == ("gguf", path)
            assert (checkpoint.config.vocab_size, checkpoint.config.head_dim) == (12, 4)
            assert checkpoint.config.tie_word_embeddings
            assert checkpoint.config.dtype == "float16"


def test_gguf_rope_divisors_reach_the_config(gguf_file):
    with open_checkpoint(gguf_file({"rope_freqs.weight": np.array([1.0, 8.0], np.float32)})) as checkpoint:
        assert checkpoint.config.rope.divisors == (1.0, 8.0)
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight must hold 2"):
        open_checkpoint(gguf_file({"rope_freqs.weight": np.ones(3, np.float32)}))


def test_published_file(smollm2_path):
    with open_checkpoint(smollm2_path) as checkpoint:
        config = checkpoint.config
        assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
        assert (config.vocab_size, config.hidden_size, config.rope.theta) == (49152, 576, 1e5)
        assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (1, (2,), True)
        bf16 = checkpoint.reader.read("blk.0.attn_q.weight", np.dtype(ml_dtypes.bfloat16))
        assert (bf16.shape, bf16.dtype) == ((576, 576), ml_dtypes.bfloat16)


def test_the_tensors_decide_the_dtype(folder):
    config = json.loads((folder / "config.json").read_text())
    for stated in ("bfloat16", None):
        (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": stated}))
        assert open_checkpoint(folder).config.dtype == "float32"


def test_places_without_a_checkpoint(tmp_path, gguf_file):
    with pytest.raises(WeightsError, match="does not exist"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(WeightsError, match=r"no config\.json and no \.gguf file"):
        open_checkpoint(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError, match="give the folder"):
        open_checkpoint(tmp_path / "weights.safetensors")
    shutil.copy(gguf_file(), tmp_path / "second.gguf")
    with pytest.raises(WeightsError, match=r"2 \.gguf files"):
        open_checkpoint(tmp_path)


def rewrite(name, text):
    return lambda folder: (folder / name).write_text(text)


def cut(name, num_bytes):
    def damage(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:num_bytes])

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (rewrite("config.json", ""), ["config.json", "JSON"]),
        (rewrite("config.json", "[]"), ["config.json", "object"]),
        (rewrite("config.json", "{}"), ["model_type"]),
        (rewrite("config.json", "[" * 100_000), ["config.json", "JSON"]),
        (rewrite("config.json", '{"text_config": 3}'), ["model_type"]),
        (cut("config.json", 300), ["config.json", "JSON"]),
        (rewrite("generation_config.json", "nonsense"), ["generation_config.json", "JSON"]),
        (rewrite("generation_config.json", '{"eos_token_id": "two"}'), ["eos_token_id", "two"]),
        (cut("model.safetensors", 4), ["model.safetensors", "header"]),
        (cut("model.safetensors", 1000), ["model.safetensors", "header"]),
        (cut("model.safetensors", 200_000), ["model.safetensors", "truncated"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["holds no weights", "pytorch_model.bin"]),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{}"), ["config.json", "JSON"]),
    ],
)
def test_damage_is_one_clear_error(folder, damage, words):
    damage(folder)
    with pytest.raises(JaxspecError) as caught:
        open_checkpoint(folder)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
