"""Host. A Hugging Face config.json, in the style of transformers 4 or 5, read into a ModelConfig."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxspec.config.fields import Fields, check_heads
from jaxspec.config.hf_families import CLASS_DEFAULTS, GPT2_KEYS, SUPPORTED_ARCHITECTURES, family_fields, reject_hybrid
from jaxspec.config.hf_rope import read_rope
from jaxspec.config.model import ModelConfig
from jaxspec.errors import ConfigError

SUPPORTED_DTYPES = ("float32", "float16", "bfloat16")
# What may stand before a model's own tensors: nothing but "model.", or a wrapper's name for its text model.
PREFIXES = {
    "gpt2": ("transformer.", ""),
    "gemma3_text": ("model.", "language_model.model.", "model.language_model."),
}


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
    if model_type == "gpt2":
        fields = Fields({GPT2_KEYS.get(key, key): value for key, value in config.items()}, label)
    fields = fields.with_defaults(CLASS_DEFAULTS.get(model_type, {}))

    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    hidden_size, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    head_dim = _head_dim(fields, model_type, hidden_size, num_heads)
    own = family_fields(fields, model_type, num_layers)
    rope, local_rope = None, None
    if model_type != "gpt2":
        check_heads(label, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        turning = own["mla"].rope_head_dim if "mla" in own else head_dim
        rope, local_rope = read_rope(fields, model_type, turning)
        rope = rope.model_copy(update={"is_interleaved": own.pop("is_interleaved", False)})
    has_head = any(name == "lm_head.weight" or name.endswith(".lm_head.weight") for name in tensor_names)
    generation = Fields(generation_config or {}, "generation_config.json")
    shared = {
        "model_type": model_type,
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "norm_eps": fields.positive("layer_norm_epsilon" if model_type == "gpt2" else "rms_norm_eps"),
        "rope": rope,
        "local_rope": local_rope,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False) or not has_head,
        "tensor_prefix": _tensor_prefix(model_type, tensor_names),
        "bos_token_id": next(iter(fields.token_ids("bos_token_id")), None),
        "eos_token_ids": generation.token_ids("eos_token_id") or fields.token_ids("eos_token_id"),
        "pad_token_id": _pad_token_id(fields),
        "dtype": _dtype(fields),
    }
    return ModelConfig(**shared | own)


def _model_type(fields: Fields, architectures: Any) -> str:
    model_type = fields.text("model_type")
    reject_hybrid(fields, model_type)
    supported = f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    for name in architectures if isinstance(architectures, list) else [architectures] if architectures else []:
        if not isinstance(name, str) or SUPPORTED_ARCHITECTURES.get(name) != model_type:
            raise ConfigError(f"architecture {name!r} with model_type {model_type!r} is not supported; {supported}")
    if model_type not in SUPPORTED_ARCHITECTURES.values():
        raise ConfigError(f"model_type {model_type!r} is not supported; {supported}")
    return model_type


def _head_dim(fields: Fields, model_type: str, hidden_size: int, num_heads: int) -> int:
    if model_type == "deepseek_v3":
        return fields.integer("qk_nope_head_dim") + fields.integer("qk_rope_head_dim")
    if "head_dim" in fields:
        return fields.integer("head_dim")
    if hidden_size % num_heads:
        raise ConfigError(
            f"{fields.label}: {hidden_size=} must be a multiple of {num_heads=} where head_dim is absent; add it"
        )
    return hidden_size // num_heads


def _tensor_prefix(model_type: str, tensor_names: Collection[str]) -> str:
    """The longest known prefix that any tensor has: a wrapper's names hold the plain ones."""
    known = sorted(PREFIXES.get(model_type, ("model.",)), key=len, reverse=True)
    return next((prefix for prefix in known if any(name.startswith(prefix) for name in tensor_names)), known[-1])


def _pad_token_id(fields: Fields) -> int | None:
    value = fields.raw("pad_token_id")
    return value if type(value) is int and value >= 0 else None  # old files write -1 for none


def _dtype(fields: Fields) -> str:
    name = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in SUPPORTED_DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(SUPPORTED_DTYPES)}, got {name!r}; correct config.json")
    return name
