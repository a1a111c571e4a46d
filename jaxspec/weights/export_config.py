"""Host. The config.json that a model read from a GGUF file would have as a Hugging Face folder, checked by reading it
back."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.config.hf import model_config_from_hf
from jaxspec.config.model import ModelConfig, MoeConfig, RopeConfig
from jaxspec.errors import WeightsError
from jaxspec.weights.export import REMEDY
from jaxspec.weights.reader import TensorInfo

# architecture of a GGUF file -> (model_type, architecture of its folder); what else "llama" may be is told below
_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "deepseek2": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "ernie4_5-moe": ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
}
# Llama 3.1 and 3.2: GGUF files hold the divisors that these give, config.json the numbers they come from.
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# What two descriptions of one model may differ in: names of the form, and what is not written. Rope is compared
# field by field.
_FORM_FIELDS = {"model_type", "dtype", "rope", "num_mtp_layers", "num_kv_heads", "tensor_prefix"}


def as_folder(config: ModelConfig) -> ModelConfig:
    """The config whose name table for "hf" is that of the folder to be written."""
    return config.model_copy(update={"tensor_prefix": ""}) if config.family == "gpt2" else config


def hf_configs(config: ModelConfig, tensor_names: Mapping[str, TensorInfo]) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json of a model read from a GGUF file.

    Raises:
      WeightsError: the model has something that these files have no words for, which is named.
    """
    model_type, architecture = _type_of(config)
    eos = list(config.eos_token_ids)
    own = _gpt2(config) if config.family == "gpt2" else _shared(config) | _OWN.get(model_type, lambda _: {})(config)
    values = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": config.dtype,
        **own,
    }
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": eos or None, "pad_token_id": config.pad_token_id}
    found = model_config_from_hf(values, generation, tensor_names).model_dump()
    wanted = config.model_dump()
    lost = sorted(name for name, value in wanted.items() if name not in _FORM_FIELDS and not _same(found[name], value))
    if config.rope is not None:
        rope = config.rope
        lost += [f"rope.{name}" for name in wanted["rope"] if _is_lost(name, wanted["rope"], found["rope"], rope)]
    if config.mla is None and found["num_kv_heads"] != config.num_kv_heads:
        lost.append("num_kv_heads")
    if lost:
        raise WeightsError(f"config.json of a {model_type} model has no words for its {', '.join(lost)}; {REMEDY}")
    return values, generation


def _type_of(config: ModelConfig) -> tuple[str, str]:
    if config.family == "mixtral":
        return "mixtral", "MixtralForCausalLM"
    if config.model_type == "llama" and _window(config) is not None:
        return "mistral", "MistralForCausalLM"
    if config.model_type not in _TYPES:
        raise WeightsError(f"{config.model_type} models cannot be written as a Hugging Face folder yet; {REMEDY}")
    return _TYPES[config.model_type]


def _same(found: Any, wanted: Any) -> bool:
    """Equal, floats to the precision of the float32 that GGUF files hold."""
    if isinstance(wanted, float) and isinstance(found, float):
        return math.isclose(found, wanted, rel_tol=1e-6)
    if isinstance(wanted, dict) and isinstance(found, dict):
        return found.keys() == wanted.keys() and all(_same(found[key], value) for key, value in wanted.items())
    if isinstance(wanted, tuple) and isinstance(found, tuple):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    return found == wanted


def _is_lost(name: str, wanted: Mapping[str, Any], found: Mapping[str, Any], rope: RopeConfig) -> bool:
    """Llama 3's scaling is said by its rule in one form and by its divisors in the other; pairs are a form's own."""
    said_otherwise = {"is_interleaved"}
    if rope.divisors is not None and rope.short_divisors is None:
        said_otherwise |= {"divisors", "kind", "factor", *_LLAMA3}
    return name not in said_otherwise and not _same(found[name], wanted[name])


def _window(config: ModelConfig) -> int | None:
    return next((window for window in config.sliding_window_layers if window is not None), None)


def _shared(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": _window(config),
        **_rope_values(config),
    }


def _rope_values(config: ModelConfig) -> dict[str, Any]:
    rope = config.rope
    assert rope is not None
    scaling: dict[str, Any] | None = None
    values: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.partial_factor != 1 or config.family == "glm4_moe":
        values["partial_rotary_factor"] = rope.partial_factor
    if rope.short_divisors is not None and rope.divisors is not None:
        values["original_max_position_embeddings"] = rope.original_max_position_embeddings
        factors = {"long_factor": list(rope.divisors), "short_factor": list(rope.short_divisors)}
        scaling = {"type": "longrope", **factors, "attention_factor": rope.attention_factor}
    elif rope.divisors is not None:
        scaling = {"rope_type": "llama3", "factor": _llama3_factor(rope, config.head_dim), **_LLAMA3}
    elif rope.kind == "linear":
        scaling = {"rope_type": "linear", "factor": rope.factor}
    elif rope.kind == "yarn":
        named = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "attention_factor")
        scaling = {"type": "yarn", "rope_type": "yarn", **{name: getattr(rope, name) for name in named}}
    elif rope.kind != "default":
        raise WeightsError(f"rope scaling {rope.kind!r} cannot be written to config.json yet; {REMEDY}")
    return values | {"rope_scaling": scaling}


def _llama3_factor(rope: RopeConfig, head_dim: int) -> float:
    """The factor whose rule gives the file's divisors. Source: the wavelength rule of Llama 3.1's release."""
    wavelengths = 2 * np.pi * rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((_LLAMA3["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0.0, 1.0)
    for factor in _LLAMA3_FACTORS:
        if np.allclose(np.asarray(rope.divisors), 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            return factor
    raise WeightsError(f"the rope divisors are not Llama 3's rule for any factor of {_LLAMA3_FACTORS}; {REMEDY}")


def _gemma(config: ModelConfig) -> dict[str, Any]:
    assert config.attention_scale is not None
    scalar = config.attention_scale**-2
    kinds = ["full_attention" if window is None else "sliding_attention" for window in config.sliding_window_layers]
    values = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scalar) if math.isclose(scalar, round(scalar), rel_tol=1e-6) else scalar,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "layer_types": kinds,
    }
    return values | ({"rope_local_base_freq": config.local_rope.theta} if config.local_rope is not None else {})


def _gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": config.hidden_size,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.max_position_embeddings,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
    }


def _moe_of(config: ModelConfig) -> MoeConfig:
    if config.moe is None:
        raise WeightsError(f"a {config.family} model without experts cannot be written yet; {REMEDY}")
    return config.moe


def _mixtral(config: ModelConfig) -> dict[str, Any]:
    moe = _moe_of(config)
    return {
        "intermediate_size": moe.intermediate_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
    }


def _qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    moe = _moe_of(config)
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, has_experts in enumerate(moe.layers) if not has_experts],
    }


def _sigmoid_moe(config: ModelConfig) -> dict[str, Any]:
    moe = _moe_of(config)
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "n_shared_experts": moe.shared_intermediate_size // moe.intermediate_size,
        "first_k_dense_replace": moe.layers.index(True),
        "n_group": moe.num_groups,
        "topk_group": moe.num_kept_groups,
        "norm_topk_prob": moe.renormalize,
        "routed_scaling_factor": moe.scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,  # the module itself is not written
    }


def _deepseek_v3(config: ModelConfig) -> dict[str, Any]:
    mla, rope = config.mla, config.rope
    assert mla is not None
    assert rope is not None
    values = {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.nope_head_dim,
        "qk_rope_head_dim": mla.rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "num_key_value_heads": config.num_heads,
        "rope_interleave": True,
    }
    if rope.kind == "yarn" and config.attention_scale is not None:
        # Two magnitudes of equal length cancel in cos and sin and are left in the scale of scores.
        magnitude = math.sqrt(config.attention_scale * math.sqrt(config.head_dim))
        mscale = round((magnitude - 1) / (0.1 * math.log(rope.factor)), 6)
        values["rope_scaling"] = _rope_values(config)["rope_scaling"] | {"mscale": mscale, "mscale_all_dim": mscale}
    return _sigmoid_moe(config) | values


def _glm4_moe(config: ModelConfig) -> dict[str, Any]:
    return _sigmoid_moe(config) | {"use_qk_norm": config.qk_norm, "attention_bias": config.qkv_bias}


def _ernie4_5_moe(config: ModelConfig) -> dict[str, Any]:
    moe = _moe_of(config)
    return {
        "moe_num_experts": moe.num_experts,
        "moe_k": moe.num_experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "moe_num_shared_experts": moe.shared_intermediate_size // moe.intermediate_size,
        "moe_layer_start_index": moe.layers.index(True),
        "moe_layer_end_index": len(moe.layers) - 1 - moe.layers[::-1].index(True),
        "moe_layer_interval": 1,
        "moe_norm_min": moe.min_weight_sum,
        "use_bias": config.o_bias,
        "num_nextn_predict_layers": 0,  # as above
    }


_OWN = {
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "ernie4_5_moe": _ernie4_5_moe,
}
