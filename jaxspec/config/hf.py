"""Host. A Hugging Face config.json, in the style of transformers 4 or 5, read into a ModelConfig."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxspec.config.fields import Fields, check_heads
from jaxspec.config.model import ModelConfig, RopeConfig
from jaxspec.errors import ConfigError

SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
SUPPORTED_ROPE = ("default", "linear", "llama3")
SUPPORTED_DTYPES = ("float32", "float16", "bfloat16")


def model_config_from_hf(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, tensor_names: Collection[str]
) -> ModelConfig:
    """What config.json describes, with the defaults of the family's own class where published files omit a key.

    Args:
      config: the parsed config.json; a text model nested under "text_config" is looked up there.
      generation_config: the parsed generation_config.json, whose eos_token_id wins.
      tensor_names: names in the checkpoint; a missing lm_head.weight means a tied head.

    Raises:
      ConfigError: an unsupported architecture or option, a missing key, or values that contradict each other.
    """
    label = "config.json"
    fields, architectures = Fields(config, label), config.get("architectures")
    if isinstance(nested := fields.raw("text_config"), dict):
        # The wrapper's architecture is another model's; what the text model omits, the wrapper may state.
        fields, architectures = Fields({**config, **nested}, label), nested.get("architectures")
    model_type = _model_type(fields, architectures)
    if "quantization_config" in fields:
        method = Fields(fields.raw("quantization_config"), "quantization_config").raw("quant_method", "unknown")
        raise ConfigError(f"quantised checkpoints are not supported yet, got quant_method {method!r}; use a full one")
    if (activation := fields.text("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"hidden_act must be silu for {model_type}, got {activation!r}; use a supported model")

    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.optional_integer("head_dim") or (128 if model_type == "qwen3" else hidden_size // num_heads)
    if "head_dim" not in fields and model_type != "qwen3" and hidden_size % num_heads:
        raise ConfigError(
            f"{label}: {hidden_size=} must be a multiple of {num_heads=} where head_dim is absent; add it"
        )
    check_heads(label, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)

    num_layers = fields.integer("num_hidden_layers")
    # Qwen2 has biases on q, k, v and no flag that says so.
    attention_bias = fields.flag("attention_bias", False) if model_type in ("llama", "qwen3") else False
    has_head = any(name == "lm_head.weight" or name.endswith(".lm_head.weight") for name in tensor_names)
    generation = Fields(generation_config or {}, "generation_config.json")
    return ModelConfig(
        family="llama",
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.positive("rms_norm_eps"),
        rope=_rope(fields),
        sliding_window_layers=_sliding_windows(fields, model_type, num_layers),
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False) if model_type == "llama" else False,
        qk_norm=model_type == "qwen3",
        tie_word_embeddings=fields.flag("tie_word_embeddings", False) or not has_head,
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=generation.token_ids("eos_token_id") or fields.token_ids("eos_token_id"),
        pad_token_id=_pad_token_id(fields),
        dtype=_dtype(fields),
    )


def _model_type(fields: Fields, architectures: Any) -> str:
    model_type = fields.text("model_type")
    supported = f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    for name in architectures if isinstance(architectures, list) else [architectures] if architectures else []:
        if not isinstance(name, str) or SUPPORTED_ARCHITECTURES.get(name) != model_type:
            raise ConfigError(f"architecture {name!r} with model_type {model_type!r} is not supported; {supported}")
    if model_type not in SUPPORTED_ARCHITECTURES.values():
        raise ConfigError(f"model_type {model_type!r} is not supported; {supported}")
    return model_type


def _rope(fields: Fields) -> RopeConfig:
    """transformers 4: rope_theta beside rope_scaling; transformers 5: both inside rope_parameters."""
    values = fields.raw("rope_parameters", fields.raw("rope_scaling", {}))
    nested = isinstance(values, dict) and values and all(isinstance(value, dict) for value in values.values())
    if nested:
        kinds = list(values.values())
        if any(kind != kinds[0] for kind in kinds):
            raise ConfigError(f"rope_parameters that differ by layer type are not supported, got {sorted(values)}")
        values = kinds[0]
    rope = Fields(values, "the rope parameters of config.json")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in SUPPORTED_ROPE:
        raise ConfigError(f"rope type {kind!r} is not supported; supported: {', '.join(SUPPORTED_ROPE)}")
    partial = rope.positive("partial_rotary_factor", fields.positive("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(f"partial_rotary_factor must be 1 for this family, got {partial}; use a supported model")
    theta = rope.positive("rope_theta", fields.positive("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=rope.positive("factor"))
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if low >= high:
        raise ConfigError(f"low_freq_factor {low} must be below high_freq_factor {high}; correct config.json")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=rope.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=rope.optional_integer("original_max_position_embeddings")
        or fields.optional_integer("original_max_position_embeddings")
        or fields.integer("max_position_embeddings"),
    )


def _sliding_windows(fields: Fields, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """One window or None a layer. layer_types decides where it is given; else each family has its own rule."""
    if model_type == "llama":
        window = None
    elif model_type == "mistral":
        # Absent means the class default, null means full attention: the two differ only here.
        window = fields.optional_integer("sliding_window") if fields.has_key("sliding_window") else 4096
    else:
        window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None

    layer_types = fields.raw("layer_types")
    if layer_types is not None:
        known = {"full_attention": None, "sliding_attention": window}
        if not isinstance(layer_types, list) or len(layer_types) != num_layers or not set(layer_types) <= set(known):
            raise ConfigError(f"layer_types must name {num_layers} layers of {sorted(known)}, got {layer_types!r:.200}")
        if "sliding_attention" in layer_types and window is None:
            raise ConfigError("layer_types has sliding layers, but sliding_window is off; correct config.json")
        return tuple(known[layer_type] for layer_type in layer_types)
    first = fields.integer("max_window_layers", 28, minimum=0) if model_type in ("qwen2", "qwen3") else 0
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _pad_token_id(fields: Fields) -> int | None:
    value = fields.raw("pad_token_id")
    return value if type(value) is int and value >= 0 else None  # old files write -1 for none


def _dtype(fields: Fields) -> str:
    name = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in SUPPORTED_DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(SUPPORTED_DTYPES)}, got {name!r}; correct config.json")
    return name
