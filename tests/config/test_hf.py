"""Host. config.json → ModelConfig: the golden folders, both styles of rope keys, and every refusal by name."""

import json
import math
from pathlib import Path

import pytest

from jaxspec.config.hf import model_config_from_hf
from jaxspec.config.hf_families import SUPPORTED_ARCHITECTURES
from jaxspec.errors import ConfigError

TINY = Path(__file__).parent.parent / "data" / "goldens" / "tiny"

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
TIED, UNTIED = ["model.embed_tokens.weight"], ["model.embed_tokens.weight", "lm_head.weight"]
ARCHITECTURES = {model_type: name for name, model_type in SUPPORTED_ARCHITECTURES.items()}


def read(changes=(), names=UNTIED, generation=None):
    """BASE with changes; a value of `...` removes the key."""
    config = {key: value for key, value in (BASE | dict(changes)).items() if value is not ...}
    return model_config_from_hf(config, generation, names)


def of_type(model_type, **changes):
    return {"model_type": model_type, "architectures": [ARCHITECTURES[model_type]], **changes}


GOLDENS = {
    "phi3-longrope": {
        "family": "phi3",
        "rope.partial_factor": 0.75,
        "rope.divisors": (1.5, 2.0, 3.0, 4.5, 6.0, 8.0),
        "rope.short_divisors": (1.0, 1.1, 1.2, 1.3, 1.5, 1.7),
        "rope.original_max_position_embeddings": 16,
        "sliding_window_layers": (262144, 262144),
    },
    "gemma2": {
        "family": "gemma",
        "attention_softcap": 5.0,
        "logit_softcap": 6.0,
        "attention_scale": 24**-0.5,
        "sliding_window_layers": (8, None, 8),
        "qk_norm": False,
        "tie_word_embeddings": True,
    },
    "gemma3-text": {
        "attention_softcap": None,
        "sliding_window_layers": (8, 8, 8, 8, 8, None, 8),
        "qk_norm": True,
        "rope.theta": 1e6,
        "local_rope.theta": 1e4,
    },
    "gpt2": {"rope": None, "num_kv_heads": 4, "intermediate_size": 160, "tensor_prefix": "", "norm_eps": 1e-5},
    "mixtral": {"moe.num_experts": 4, "moe.num_experts_per_token": 2, "moe.intermediate_size": 48},
    "qwen3-moe": {"moe.num_experts": 8, "moe.renormalize": True, "moe.layers": (True, True), "qk_norm": True},
    "glm4-moe-mtp": {
        "rope.partial_factor": 0.5,
        "moe.scale": 1.5,
        "moe.layers": (False, True),
        "moe.shared_intermediate_size": 16,
        "qkv_bias": True,
        "o_bias": False,
        "num_mtp_layers": 1,
    },
    "deepseek-v3-mtp": {
        "head_dim": 14,
        "mla.kv_lora_rank": 12,
        "moe.num_groups": 4,
        "moe.num_kept_groups": 2,
        "moe.score": "sigmoid",
        "rope.kind": "yarn",
        "rope.attention_factor": 1.0,
        "attention_scale": 14**-0.5 * (0.1 * math.log(40) + 1) ** 2,
        "cache_heads": (1, 20),
    },
    "llama": {"tie_word_embeddings": True, "rope.kind": "default", "rope.theta": 1e4, "eos_token_ids": (2,)},
    "llama31": {
        "tie_word_embeddings": False,
        "rope.kind": "llama3",
        "rope.theta": 5e5,
        "rope.factor": 8.0,
        "rope.original_max_position_embeddings": 32,
        "eos_token_ids": (2, 5, 6),
    },
    "llama-7layer": {"num_layers": 7, "hidden_size": 32, "head_dim": 8, "rope.kind": "llama3"},
    "mistral-swa": {"model_type": "mistral", "sliding_window_layers": (8, 8, 8), "tie_word_embeddings": False},
    "qwen2": {"qkv_bias": True, "o_bias": False, "sliding_window_layers": (None,) * 3, "rope.theta": 1e6},
    "qwen3": {"qk_norm": True, "qkv_bias": False, "head_dim": 16, "hidden_size": 40, "num_layers": 4},
    "qwen3-bf16": {"qk_norm": True, "dtype": "bfloat16"},
}


@pytest.mark.parametrize("folder", GOLDENS)
def test_golden_folders(folder):
    config = json.loads((TINY / folder / "config.json").read_text())
    generation = TINY / folder / "generation_config.json"
    generation = json.loads(generation.read_text()) if generation.exists() else None
    model = model_config_from_hf(config, generation, TIED if config.get("tie_word_embeddings", True) else UNTIED)
    assert (model.vocab_size, model.num_heads) == (128, 4)
    if folder.split("-")[0] in ("llama", "llama31", "mistral", "qwen2", "qwen3") and folder != "qwen3-moe":
        assert (model.family, model.num_kv_heads) == ("llama", 2)
    for path, expected in GOLDENS[folder].items():
        value = model
        for key in path.split("."):
            value = getattr(value, key)
        assert value == expected, path


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"kind": "default", "theta": 10000.0}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"kind": "default", "theta": 5e5}),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e6}, {"kind": "linear", "factor": 4.0}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, {"kind": "default", "theta": 7e4}),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 7e4, "factor": 2}}, {"factor": 2.0, "theta": 7e4}),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 3e4}}},
            {"kind": "default", "theta": 3e4},
        ),
        (
            {
                "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
                "original_max_position_embeddings": 64,
            },
            {"kind": "llama3", "original_max_position_embeddings": 64},
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}},
            {"kind": "llama3", "original_max_position_embeddings": 256},
        ),
    ],
)
def test_rope_in_either_style(changes, expected):
    rope = read(changes).rope
    assert {key: getattr(rope, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, None, None)),
        ({"sliding_window": 8}, (None, None, None)),  # Llama has no such option
        (of_type("mistral"), (4096,) * 3),  # the class's own default
        (of_type("mistral", sliding_window=None), (None,) * 3),
        (of_type("mistral", sliding_window=8, layer_types=["full_attention", "sliding_attention", "full_attention"]),
         (None, 8, None)),
        (of_type("qwen2", sliding_window=8, use_sliding_window=False, max_window_layers=1), (None,) * 3),
        (of_type("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=1), (None, 8, 8)),
        (of_type("qwen3", sliding_window=8, use_sliding_window=True, max_window_layers=0), (8, 8, 8)),
        (of_type("qwen3", use_sliding_window=True, max_window_layers=2), (None, None, 4096)),
    ],
)  # fmt: skip
def test_sliding_windows(changes, windows):
    assert read(changes).sliding_window_layers == windows


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 24},
        {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2},
        {"rope_theta": 2e5, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    ],
)
def test_agrees_with_transformers(model_type, changes):
    transformers = pytest.importorskip("transformers")
    changes = {"model_type": model_type, "architectures": ..., **changes}
    ours = read(changes)
    values = {key: value for key, value in (BASE | changes).items() if value is not ... and key != "architectures"}
    theirs = transformers.AutoConfig.for_model(**values)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert (ours.rope.theta, ours.rope.kind) == (
        theirs.rope_parameters["rope_theta"],
        theirs.rope_parameters["rope_type"],
    )
    if layer_types := getattr(theirs, "layer_types", None):
        windows = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in layer_types)
    else:
        windows = (getattr(theirs, "sliding_window", None) if model_type == "mistral" else None,) * 3
    assert ours.sliding_window_layers == windows


# A published file of each, without what its class would fill in.
BARE = {
    "phi3": {},
    "gemma2": {"num_attention_heads": ..., "num_key_value_heads": ..., "rms_norm_eps": ...},
    "gemma3_text": {"num_attention_heads": ..., "rms_norm_eps": ..., "max_position_embeddings": ..., "vocab_size": ...},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v3": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 8,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 4,
        "v_head_dim": 6,
        "num_hidden_layers": 4,
    },
    "glm4_moe": {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 16},
}


@pytest.mark.parametrize("model_type", BARE)
def test_class_defaults_are_those_of_transformers(model_type):
    transformers = pytest.importorskip("transformers")
    changes = {**BARE[model_type], "model_type": model_type, "architectures": ...}
    ours = read(changes)
    values = {key: value for key, value in (BASE | changes).items() if value is not ...}
    theirs = transformers.AutoConfig.for_model(**values)
    assert (ours.num_heads, ours.norm_eps) == (theirs.num_attention_heads, theirs.rms_norm_eps)
    assert (ours.vocab_size, ours.max_position_embeddings) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    ropes = theirs.rope_parameters
    full = ropes.get("full_attention", ropes)
    assert ours.rope.theta == full["rope_theta"]
    if model_type != "deepseek_v3":
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.rope.partial_factor == full.get("partial_rotary_factor", 1.0)
    if model_type.startswith("gemma"):
        assert (ours.attention_softcap, ours.logit_softcap) == (
            theirs.attn_logit_softcapping,
            theirs.final_logit_softcapping,
        )
        assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
        assert ours.sliding_window_layers == tuple(
            theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types
        )
    if model_type in ("deepseek_v3", "glm4_moe"):
        assert (ours.moe.num_groups, ours.moe.num_kept_groups) == (theirs.n_group, theirs.topk_group)
        assert (ours.moe.scale, ours.moe.renormalize) == (theirs.routed_scaling_factor, theirs.norm_topk_prob)
        assert ours.moe.layers.index(True) == theirs.first_k_dense_replace
        assert ours.num_mtp_layers == theirs.num_mtp_layers
    if model_type == "qwen3_moe":
        assert ours.moe.renormalize == theirs.norm_topk_prob
    if model_type == "ernie4_5_moe":
        assert ours.moe.layers == tuple(1 <= layer <= theirs.moe_layer_end_index for layer in range(3))
        assert ours.moe.shared_intermediate_size == theirs.moe_num_shared_experts * 16
        assert ours.moe.min_weight_sum == theirs.moe_norm_min


def test_a_multimodal_wrapper_of_gemma3():
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    for prefix in ("language_model.model.", "model.language_model."):
        model = model_config_from_hf(config, None, [f"{prefix}embed_tokens.weight", "vision_tower.x.weight"])
        assert (model.tensor_prefix, model.num_heads, model.vocab_size) == (prefix, 8, 262208)


def test_older_names_of_longrope():
    factors = {"long_factor": [2.0] * 6, "short_factor": [1.0] * 6}
    for kind in ("su", "yarn", "longrope"):
        rope = read(of_type("phi3", rope_scaling={"type": kind, **factors}, original_max_position_embeddings=16)).rope
        assert (rope.kind, rope.divisors, rope.short_divisors) == ("default", (2.0,) * 6, (1.0,) * 6)
        assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(16) / math.log(16)))


HYBRIDS = [
    {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]},
    {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]},
    of_type("qwen3", layer_types=["linear_attention", "linear_attention", "full_attention"]),
]


@pytest.mark.parametrize("changes", HYBRIDS)
def test_a_cache_that_cannot_rewind_is_refused_by_name(changes):
    with pytest.raises(ConfigError, match=rf"{changes['model_type']}.*linear.attention.*rewind"):
        read(changes)


def test_key_value_heads_default_to_the_heads():
    assert read({"num_key_value_heads": ...}).num_kv_heads == 4


def test_biases_follow_the_family():
    assert not read({"attention_bias": ...}).qkv_bias
    biased = read({"attention_bias": True, "mlp_bias": True})
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)
    qwen2 = read(of_type("qwen2"))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)


def test_head_is_tied_by_flag_or_by_absence():
    assert not read().tie_word_embeddings
    assert read({"tie_word_embeddings": True}).tie_word_embeddings
    assert read(names=TIED).tie_word_embeddings


def test_end_ids_come_from_the_generation_config_first():
    assert read({"eos_token_id": 7}).eos_token_ids == (7,)
    assert read({"eos_token_id": 7}, generation={"eos_token_id": [8, 9, 8]}).eos_token_ids == (8, 9)
    assert read({"eos_token_id": 0}).eos_token_ids == (0,)
    assert read({"eos_token_id": 7}, generation={}).eos_token_ids == (7,)
    assert read().eos_token_ids == ()


def test_nested_text_config_is_read_and_its_wrapper_ignored():
    text = {key: value for key, value in BASE.items() if key != "architectures"}
    wrapper = {"architectures": ["SomethingForConditionalGeneration"], "model_type": "something", "text_config": text}
    model = model_config_from_hf(wrapper | {"tie_word_embeddings": True}, None, ["language_model.lm_head.weight"])
    assert (model.model_type, model.hidden_size, model.tie_word_embeddings) == ("llama", 48, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({key: ...}, [key]) for key in BASE if key not in ("architectures", "num_key_value_heads")),
        ({"architectures": ["OPTForCausalLM"], "model_type": "opt"}, ["OPTForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, ["LlamaForCausalLMEagle3", "supported"]),
        ({"architectures": ["Qwen2ForCausalLM"]}, ["Qwen2ForCausalLM", "llama"]),
        ({"architectures": [["LlamaForCausalLM"]]}, ["LlamaForCausalLM", "not supported"]),
        ({"architectures": ..., "model_type": "bloom"}, ["bloom", "LlamaForCausalLM"]),
        ({"rope_scaling": {"rope_type": "axial", "factor": 4}}, ["axial", "llama3"]),
        ({"rope_scaling": {"type": "dynamic"}}, ["factor"]),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 6, "short_factor": [1.0] * 5}}, ["short", "6"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor"]),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ["factor", "0"]),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, ["factor", "nan"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, ["low_freq_factor"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
         ["low_freq_factor", "below"]),
        ({"rope_scaling": "linear"}, ["rope parameters", "linear"]),
        ({"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}}, ["layer type"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["gptq"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_hidden_layers": "3"}, ["num_hidden_layers", "'3'"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"num_hidden_layers": 3.5}, ["num_hidden_layers", "3.5"]),
        ({"vocab_size": 2**40}, ["vocab_size"]),
        ({"num_attention_heads": 5}, ["hidden_size", "head"]),
        ({"num_key_value_heads": 3}, ["num_kv_heads", "3"]),
        ({"head_dim": 13}, ["head_dim", "13"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
        ({"eos_token_id": "2"}, ["eos_token_id"]),
        ({"torch_dtype": "int8"}, ["dtype", "int8", "bfloat16"]),
        (of_type("mistral", layer_types=["full_attention"]), ["layer_types", "3"]),
        (of_type("mistral", layer_types=["chunked_attention"] * 3), ["layer_types", "chunked_attention"]),
        (of_type("qwen2", layer_types=["sliding_attention"] * 3), ["sliding_window"]),
    ],
)  # fmt: skip
def test_refusals_name_what_is_wrong(changes, words):
    with pytest.raises(ConfigError) as caught:
        read(changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)
