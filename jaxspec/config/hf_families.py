"""Host. What sets one family's config.json apart: its class's defaults, its windows, experts, scales and biases."""

from typing import Any

from jaxspec.config.fields import Fields
from jaxspec.config.hf_rope import yarn_magnitude
from jaxspec.config.model import MlaConfig, MoeConfig
from jaxspec.errors import ConfigError

SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MiMoForCausalLM": "mimo",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GPT2LMHeadModel": "gpt2",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
}
FAMILIES = {
    "mistral": "llama", "qwen2": "llama", "qwen3": "llama", "mimo": "llama", "gemma2": "gemma", "gemma3_text": "gemma",
}  # fmt: skip

# What the class of each model type assumes where a file does not write the key, as far as files are known to omit it.
_GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_SIGMOID_ROUTER = {"norm_topk_prob": True, "n_shared_experts": 1, "num_nextn_predict_layers": 1}
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "phi3": {"original_max_position_embeddings": 4096},
    "gemma2": _GEMMA
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192},
    "gemma3_text": _GEMMA | {"vocab_size": 262208, "max_position_embeddings": 131072},
    "gpt2": {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 1024},
    "mixtral": {"num_experts_per_tok": 2},
    "deepseek_v3": _SIGMOID_ROUTER
    | {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5},
    "glm4_moe": _SIGMOID_ROUTER | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {
        "tie_word_embeddings": True,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_norm_min": 1e-12,
        "num_nextn_predict_layers": 0,
    },
}
GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}
HYBRIDS = (
    *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "jamba", "bamba", "zamba2"),
    *("falcon_h1", "nemotron_h", "granitemoehybrid", "lfm2", "minimax", "kimi_linear", "mamba", "mamba2"),
)


def reject_hybrid(fields: Fields, model_type: str) -> None:
    """Refuses models with recurrent layers: a recurrent state holds no past to return to when a draft is rejected."""
    layer_types = fields.raw("layer_types")
    recurrent = sorted(
        {str(kind) for kind in layer_types if "linear" in str(kind) or "mamba" in str(kind) or "recurrent" in str(kind)}
        if isinstance(layer_types, list)
        else set()
    )
    if model_type in HYBRIDS or recurrent:
        raise ConfigError(
            f"model_type {model_type!r} has {' and '.join(recurrent) or 'linear-attention or other recurrent'} layers, "
            "whose state cannot rewind when a draft is rejected; use a model with attention in every layer"
        )


def family_fields(fields: Fields, model_type: str, num_layers: int) -> dict[str, Any]:
    """The fields of ModelConfig that this family reads its own way."""
    activation = fields.text(
        {"gpt2": "activation_function", "gemma2": "hidden_activation", "gemma3_text": "hidden_activation"}.get(
            model_type, "hidden_act"
        ),
        _activations(model_type)[0],
    )
    if activation not in _activations(model_type):
        raise ConfigError(
            f"hidden_act must be {_activations(model_type)[0]} for {model_type}, got {activation!r}; "
            "use a supported model"
        )
    common = {
        "family": FAMILIES.get(model_type, model_type),
        "intermediate_size": _intermediate_size(fields, model_type),
        "sliding_window_layers": _sliding_windows(fields, model_type, num_layers),
        "num_mtp_layers": _num_mtp_layers(fields),
    }
    return common | _OWN.get(model_type, lambda _, __: {})(fields, num_layers)


def _activations(model_type: str) -> tuple[str, ...]:
    if model_type == "gpt2":
        return "gelu_new", "gelu_pytorch_tanh", "gelu_fast"
    return ("gelu_pytorch_tanh", "gelu_new") if model_type.startswith("gemma") else ("silu", "swish")


def _intermediate_size(fields: Fields, model_type: str) -> int:
    if model_type == "gpt2":
        return fields.optional_integer("intermediate_size") or 4 * fields.integer("hidden_size")
    return fields.integer("intermediate_size")


def _num_mtp_layers(fields: Fields) -> int:
    keys = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
    return next((fields.integer(key, minimum=0) for key in keys if key in fields), 0)


def _sliding_windows(fields: Fields, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """One window or None a layer. layer_types decides where it is given; else each family has its own rule."""
    if model_type in ("mixtral", "phi3"):
        window = fields.optional_integer("sliding_window")
    elif model_type == "mistral":
        # Absent means the class default, null means full attention: the two differ only here.
        window = fields.optional_integer("sliding_window") if fields.has_key("sliding_window") else 4096
    elif model_type in ("qwen2", "qwen3", "mimo", "qwen3_moe"):
        window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    else:
        window = fields.integer("sliding_window") if model_type in ("gemma2", "gemma3_text") else None

    layer_types = fields.raw("layer_types")
    if layer_types is not None:
        known = {"full_attention": None, "sliding_attention": window}
        if not isinstance(layer_types, list) or len(layer_types) != num_layers or not set(layer_types) <= set(known):
            raise ConfigError(f"layer_types must name {num_layers} layers of {sorted(known)}, got {layer_types!r:.200}")
        if "sliding_attention" in layer_types and window is None:
            raise ConfigError("layer_types has sliding layers, but sliding_window is off; correct config.json")
        return tuple(known[layer_type] for layer_type in layer_types)
    if model_type in ("gemma2", "gemma3_text"):
        pattern = 2 if model_type == "gemma2" else fields.integer("sliding_window_pattern", 6)
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    first = fields.integer("max_window_layers", 28, minimum=0) if model_type in ("qwen2", "qwen3", "mimo") else 0
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _llama(fields: Fields, num_layers: int) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": fields.flag("mlp_bias", False)}


def _qwen2(fields: Fields, num_layers: int) -> dict[str, Any]:
    return {"qkv_bias": True}  # no flag says so


def _qwen3(fields: Fields, num_layers: int) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True}


def _gemma(fields: Fields, num_layers: int) -> dict[str, Any]:
    if fields.flag("use_bidirectional_attention", False):
        raise ConfigError("use_bidirectional_attention must be off to generate text; use a causal model")
    bias = fields.flag("attention_bias", False)
    return {
        "attention_scale": fields.positive("query_pre_attn_scalar") ** -0.5,
        "attention_softcap": fields.optional_positive("attn_logit_softcapping"),
        "logit_softcap": fields.optional_positive("final_logit_softcapping"),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": fields.text("model_type") != "gemma2",
    }


def _gpt2(fields: Fields, num_layers: int) -> dict[str, Any]:
    if fields.flag("add_cross_attention", False):
        raise ConfigError("add_cross_attention must be off: there is nothing to attend to; use a decoder-only model")
    return {
        "attention_scale": None if fields.flag("scale_attn_weights", True) else 1.0,
        "scale_by_inverse_layer": fields.flag("scale_attn_by_inverse_layer_idx", False),
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
    }


def _mixtral(fields: Fields, num_layers: int) -> dict[str, Any]:
    moe = _moe(
        layers=(True,) * num_layers,
        num_experts=fields.integer("num_local_experts", fields.optional_integer("num_experts")),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
    )
    return {"moe": moe}


def _qwen3_moe(fields: Fields, num_layers: int) -> dict[str, Any]:
    dense = fields.raw("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ConfigError(f"mlp_only_layers must be a list of layer numbers, got {dense!r:.100}; correct config.json")
    step = fields.integer("decoder_sparse_step", 1)
    num_experts = fields.integer("num_experts", fields.raw("num_local_experts"), minimum=0)
    layers = tuple(num_experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
    if not any(layers):
        return _qwen3(fields, num_layers)
    moe = _moe(
        layers=layers,
        num_experts=num_experts,
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob", False),
    )
    return _qwen3(fields, num_layers) | {"moe": moe}


def _sigmoid_moe(fields: Fields, num_layers: int) -> MoeConfig | None:
    """The router of DeepSeek-V3 and GLM-4.5."""
    for key, wanted in {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}.items():
        if (value := fields.raw(key, wanted)) != wanted:
            raise ConfigError(f"{key} must be {wanted!r}, got {value!r}; use a supported model")
    width = fields.integer("moe_intermediate_size")
    first = fields.integer("first_k_dense_replace", minimum=0)
    if first >= num_layers:
        return None
    return _moe(
        layers=tuple(layer >= first for layer in range(num_layers)),
        num_experts=fields.integer("n_routed_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=width,
        shared_intermediate_size=width * fields.integer("n_shared_experts", 0, minimum=0),
        score="sigmoid",
        has_correction_bias=True,
        num_groups=fields.integer("n_group", 1),
        num_kept_groups=fields.integer("topk_group", 1),
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.positive("routed_scaling_factor", 1.0),
    )


def _deepseek_v3(fields: Fields, num_layers: int) -> dict[str, Any]:
    mla = MlaConfig(
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        nope_head_dim=fields.integer("qk_nope_head_dim"),
        rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
    )
    scale = (mla.nope_head_dim + mla.rope_head_dim) ** -0.5
    rope = Fields(fields.raw("rope_parameters", fields.raw("rope_scaling", {})), "the rope parameters of config.json")
    if rope.text("rope_type", rope.text("type", "default")) != "default" and rope.raw("mscale_all_dim", 0):
        scale *= yarn_magnitude(rope.positive("factor"), rope.positive("mscale_all_dim")) ** 2
    bias = fields.flag("attention_bias", False)
    return {
        "mla": mla,
        "moe": _sigmoid_moe(fields, num_layers),
        "attention_scale": scale,
        "num_kv_heads": fields.integer("num_attention_heads"),
        "qkv_bias": bias,  # of the projections into the latents
        "o_bias": bias,
        "is_interleaved": fields.flag("rope_interleave", True),
    }


def _glm4_moe(fields: Fields, num_layers: int) -> dict[str, Any]:
    return {
        "moe": _sigmoid_moe(fields, num_layers),
        "qkv_bias": fields.flag("attention_bias", False),
        "qk_norm": fields.flag("use_qk_norm", False),
    }


def _ernie4_5_moe(fields: Fields, num_layers: int) -> dict[str, Any]:
    first = fields.integer("moe_layer_start_index", minimum=0)
    last = fields.integer("moe_layer_end_index", minimum=-1)
    interval = fields.integer("moe_layer_interval", 1)
    last = num_layers - 1 if last == -1 else last
    width = fields.integer("moe_intermediate_size")
    bias = fields.flag("use_bias", False)
    biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "head_bias"), bias)
    layers = tuple(first <= layer <= last and (layer + 1) % interval == 0 for layer in range(num_layers))
    if not any(layers):
        return biases | {"is_interleaved": True}
    moe = _moe(
        layers=layers,
        num_experts=fields.integer("moe_num_experts", fields.optional_integer("num_experts")),
        num_experts_per_token=fields.integer("moe_k", fields.optional_integer("num_experts_per_tok")),
        intermediate_size=width,
        shared_intermediate_size=width * fields.integer("moe_num_shared_experts", minimum=0),
        shared_bias=bias,  # the routed experts have none
        has_correction_bias=True,
        min_weight_sum=fields.positive("moe_norm_min"),
    )
    return biases | {"moe": moe, "is_interleaved": True}


def _moe(**values: Any) -> MoeConfig:
    moe = MoeConfig(**values)
    if moe.num_experts_per_token > moe.num_experts:
        raise ConfigError(f"{moe.num_experts_per_token} experts a token exceed {moe.num_experts} experts; correct it")
    if moe.num_groups > 1:
        size, left = divmod(moe.num_experts, moe.num_groups)
        if left or size < 2 or not 1 <= moe.num_kept_groups <= moe.num_groups:
            raise ConfigError(
                f"{moe.num_experts} experts must form {moe.num_groups} equal groups of two or more, of which "
                f"topk_group={moe.num_kept_groups} are kept; correct config.json"
            )
        if moe.num_kept_groups * size < moe.num_experts_per_token:
            raise ConfigError(
                f"{moe.num_experts_per_token} experts a token exceed the {moe.num_kept_groups * size} of the kept "
                "groups; correct config.json"
            )
    return moe


_OWN = {
    "llama": _llama,
    "qwen2": _qwen2,
    "mimo": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "ernie4_5_moe": _ernie4_5_moe,
}
