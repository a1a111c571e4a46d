"""Host. GGUF metadata → ModelConfig."""

import math

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
    rope_tensors = {} if divisors is None else {"rope_freqs.weight": divisors}
    return model_config_from_gguf(metadata | {"general.architecture": arch}, shapes, rope_tensors)


def test_fields():
    model = read()
    assert model.model_dump(exclude_defaults=True) == {
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
        "norm_eps": 1e-5,
        "rope": {"theta": 5e5, "is_interleaved": True},
        "sliding_window_layers": (None, None),
        "bos_token_id": 1,
        "eos_token_ids": (2,),
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
        ({"llama.expert_count": 8}, SHAPES, None, ["llama.expert_count", "router"]),
        ({"llama.expert_count": 8}, SHAPES | {"blk.0.ffn_gate_inp.weight": (8, 32)}, None, ["ffn_gate_exps", "stack"]),
        ({"llama.rope.dimension_count": 4}, SHAPES, None, ["rope.dimension_count", "4", "8"]),
        ({"llama.attention.value_length": 16}, SHAPES, None, ["value_length", "16"]),
        ({"llama.rope.scaling.type": "axial"}, SHAPES, None, ["axial", "linear"]),
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


def test_a_cache_that_cannot_rewind_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'qwen3next'.*recurrent.*rewind"):
        read({"llama.ssm.state_size": 16}, arch="qwen3next")


def test_unsupported_architecture_lists_the_supported():
    with pytest.raises(ConfigError, match=r"'mamba'.*llama, qwen2, qwen3"):
        read(arch="mamba")


PHI3 = {"llama.rope.dimension_count": 6, "llama.rope.scaling.original_context_length": 128}
FACTORS = {"rope_factors_long.weight": [2.0, 3.0, 4.0], "rope_factors_short.weight": [1.0, 1.0, 1.5]}


def test_longrope_lives_in_its_tensors():
    metadata = {key.replace("llama.", "phi3."): value for key, value in (METADATA | PHI3).items()}
    shapes = SHAPES | dict.fromkeys(FACTORS, (3,))
    rope = model_config_from_gguf(metadata | {"general.architecture": "phi3"}, shapes, FACTORS).rope
    assert (rope.divisors, rope.short_divisors) == ((2.0, 3.0, 4.0), (1.0, 1.0, 1.5))
    assert (rope.partial_factor, rope.original_max_position_embeddings) == (0.75, 128)
    assert rope.attention_factor == pytest.approx((1 + math.log(4) / math.log(128)) ** 0.5)


EXPERTS = {"blk.1.ffn_gate_inp.weight": (8, 32), "blk.1.ffn_gate_exps.weight": (8, 12, 32)}


def test_experts_are_where_the_tensors_have_a_router():
    keys = {"llama.expert_count": 8, "llama.expert_used_count": 2}
    mixtral = read(keys, SHAPES | EXPERTS)
    assert (mixtral.family, mixtral.moe.layers, mixtral.moe.intermediate_size) == ("mixtral", (False, True), 12)
    assert (mixtral.moe.renormalize, mixtral.moe.score, mixtral.moe.shared_intermediate_size) == (True, "softmax", 0)
    more = {"blk.1.exp_probs_b.bias": (8,), "blk.1.ffn_gate_shexp.weight": (20, 32)}
    glm = read(keys | {"llama.rope.dimension_count": 4, "llama.nextn_predict_layers": 1, "llama.block_count": 3},
               SHAPES | EXPERTS | more, arch="glm4moe")  # fmt: skip
    assert (glm.num_layers, glm.num_mtp_layers, glm.rope.partial_factor) == (2, 1, 0.5)
    assert (glm.moe.score, glm.moe.has_correction_bias, glm.moe.shared_intermediate_size) == ("sigmoid", True, 20)


def test_gemma_windows_scales_and_caps():
    keys = {"llama.attention.sliding_window": 8, "llama.block_count": 3}
    gemma2 = read(keys, arch="gemma2")
    assert gemma2.sliding_window_layers == (8, None, 8)
    assert (gemma2.attention_softcap, gemma2.logit_softcap) == (50.0, 30.0)
    gemma3 = read(keys | {"llama.attention.sliding_window_pattern": [True, True, False]}, arch="gemma3")
    assert gemma3.sliding_window_layers == (8, 8, None)
    assert (gemma3.attention_softcap, gemma3.local_rope.theta, gemma3.rope.theta) == (None, 1e4, 5e5)
    assert gemma3.attention_scale == 8**-0.5
    large = read(keys | {"llama.block_count": 46, "llama.attention.key_length": 16, "llama.rope.dimension_count": 16},
                 arch="gemma2")  # fmt: skip
    assert large.attention_scale == (32 / 4) ** -0.5  # the one of 27 billion: by hidden size and heads
