"""Host. GGUF metadata → ModelConfig."""

import pytest

from jaxspec.config.gguf import model_config_from_gguf
from jaxspec.errors import ConfigError

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5e5,
    "llama.rope.dimension_count": 8,
    "llama.vocab_size": 96,
    "tokenizer.ggml.tokens": ["x"] * 90,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
SHAPES = {"token_embd.weight": (96, 32), "output.weight": (96, 32)}


def read(changes=(), shapes=SHAPES, divisors=None, arch="llama"):
    metadata = METADATA | dict(changes)
    metadata = {key.replace("llama.", f"{arch}.", 1): value for key, value in metadata.items() if value is not ...}
    return model_config_from_gguf(metadata | {"general.architecture": arch}, shapes, divisors)


def test_fields():
    model = read()
    assert model.model_dump() == {
        "family": "llama",
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope": {
            "theta": 5e5,
            "kind": "default",
            "factor": 1.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 0,
            "divisors": None,
        },
        "sliding_window_layers": (None, None),
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
        "pad_token_id": None,
        "dtype": "float32",
    }


def test_what_only_the_tensors_tell():
    assert read(shapes={"token_embd.weight": (96, 32)}).tie_word_embeddings
    names = ("blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_up.bias")
    biased = read(shapes=SHAPES | dict.fromkeys(names, (32,)))
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)
    assert read({"llama.vocab_size": ...}).vocab_size == 96


def test_families():
    qwen2, qwen3 = read(arch="qwen2"), read({"llama.attention.key_length": 8}, arch="qwen3")
    assert (qwen2.qkv_bias, qwen2.qk_norm) == (True, False)
    assert (qwen3.qkv_bias, qwen3.qk_norm) == (False, True)
    assert read({"llama.attention.key_length": 16, "llama.rope.dimension_count": 16}).head_dim == 16
    assert read({"llama.attention.sliding_window": 9}).sliding_window_layers == (9, 9)
    assert read({"llama.attention.head_count_kv": ...}).num_kv_heads == 4


def test_rope():
    linear = read({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}).rope
    assert (linear.kind, linear.factor) == ("linear", 4.0)
    old = read({"llama.rope.scale_linear": 2.0}).rope
    assert (old.kind, old.factor) == ("linear", 2.0)
    divided = read(shapes=SHAPES | {"rope_freqs.weight": (4,)}, divisors=[1.0, 1.0, 4.0, 8.0]).rope
    assert (divided.kind, divided.divisors) == ("default", (1.0, 1.0, 4.0, 8.0))


def test_every_end_id():
    ends = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    assert read(ends).eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("changes", "shapes", "divisors", "words"),
    [
        *(({key: ...}, SHAPES, None, [key]) for key in METADATA
          if key.startswith("llama.") and key.split(".")[-1] not in
          ("head_count_kv", "freq_base", "dimension_count", "vocab_size")),
        ({"llama.expert_count": 8}, SHAPES, None, ["experts", "8"]),
        ({"llama.rope.dimension_count": 4}, SHAPES, None, ["rope.dimension_count", "4", "8"]),
        ({"llama.attention.value_length": 16}, SHAPES, None, ["value_length", "16"]),
        ({"llama.rope.scaling.type": "yarn"}, SHAPES, None, ["yarn", "linear"]),
        ({"llama.vocab_size": 97}, SHAPES, None, ["96", "97"]),
        ({"tokenizer.ggml.tokens": ["x"] * 100}, SHAPES, None, ["96", "100"]),
        ({}, {}, None, ["token_embd.weight"]),
        ({}, SHAPES | {"rope_freqs.weight": (4,)}, None, ["rope_freqs.weight", "4"]),
        ({}, SHAPES | {"rope_freqs.weight": (4,)}, [1.0, 2.0], ["rope_freqs.weight"]),
        ({}, SHAPES | {"rope_freqs.weight": (4,)}, [1.0, 0.0, 1.0, 1.0], ["positive"]),
        ({}, SHAPES | {"rope_freqs.weight": (4,)}, [1.0, float("nan"), 1.0, 1.0], ["positive"]),
        ({"llama.attention.head_count": [4, 4]}, SHAPES, None, ["head_count", "[4, 4]"]),
        ({"llama.attention.head_count_kv": 3}, SHAPES, None, ["num_kv_heads"]),
        ({"llama.block_count": -1}, SHAPES, None, ["block_count", "-1"]),
    ],
)  # fmt: skip
def test_refusals_name_what_is_wrong(changes, shapes, divisors, words):
    with pytest.raises(ConfigError) as caught:
        read(changes, shapes, divisors)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_unsupported_architecture_lists_the_supported():
    with pytest.raises(ConfigError, match=r"'gemma2'.*llama, qwen2, qwen3"):
        read(arch="gemma2")
