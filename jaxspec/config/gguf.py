"""Host. GGUF metadata, as a plain dict, read into a ModelConfig."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.config.fields import Fields, check_heads
from jaxspec.config.gguf_families import FAMILIES, INTERLEAVED, family_fields
from jaxspec.config.hf_rope import longrope
from jaxspec.config.model import MlaConfig, ModelConfig, RopeConfig
from jaxspec.errors import ConfigError

ROPE_DIVISORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_DIVISORS, LONG_FACTORS, SHORT_FACTORS)  # read with the config, not as weights
PARTIAL = ("phi3", "glm4moe")


def model_config_from_gguf(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_tensors: Mapping[str, Sequence[float]] | None = None,
) -> ModelConfig:
    """What the file's keys and tensor table describe.

    Args:
      metadata: the file's keys.
      tensor_shapes: {tensor name: shape}, [out, in]. Biases, experts and a head of its own are known only from here.
      rope_tensors: the values of the tensors of ROPE_TENSORS that the file has: Llama 3's scaling and longrope's
        factors live in them alone.

    Raises:
      ConfigError: an unsupported architecture or option, a missing key, or keys that contradict the tensors.
    """
    fields = Fields(metadata, "the GGUF metadata")
    arch = fields.text("general.architecture")
    if any(key.startswith(f"{arch}.ssm.") for key in metadata):
        raise ConfigError(
            f"GGUF architecture {arch!r} has recurrent layers, whose state cannot rewind when a draft is rejected; "
            "use a model with attention in every layer"
        )
    if arch not in FAMILIES:
        raise ConfigError(f"GGUF architecture {arch!r} is not supported; supported: {', '.join(FAMILIES)}")
    num_heads = fields.integer(f"{arch}.attention.head_count")
    num_kv_heads = fields.integer(f"{arch}.attention.head_count_kv", num_heads)
    hidden_size = fields.integer(f"{arch}.embedding_length")
    # Multi-token-prediction modules are counted as blocks.
    num_mtp_layers = fields.integer(f"{arch}.nextn_predict_layers", 0, minimum=0)
    num_layers = fields.integer(f"{arch}.block_count") - num_mtp_layers
    mla = _mla(fields, arch) if arch == "deepseek2" else None
    if mla is not None:
        head_dim, num_kv_heads, turning = mla.nope_head_dim + mla.rope_head_dim, num_heads, mla.rope_head_dim
    else:
        turning = head_dim = fields.integer(f"{arch}.attention.key_length", max(1, hidden_size // num_heads))
        _check_equal(fields, f"{arch}.attention.value_length", head_dim)
    rope = None
    if arch != "gpt2":
        check_heads(fields.label, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        rope = _rope(fields, arch, turning, rope_tensors or {}, tensor_shapes)
        rope = rope.model_copy(update={"is_interleaved": arch in INTERLEAVED})
    shared = {
        "model_type": arch,
        "vocab_size": _vocab_size(fields, arch, tensor_shapes),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer(f"{arch}.feed_forward_length"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer(f"{arch}.context_length"),
        "norm_eps": fields.positive(
            f"{arch}.attention.layer_norm_epsilon" if arch == "gpt2" else f"{arch}.attention.layer_norm_rms_epsilon"
        ),
        "rope": rope,
        "mla": mla,
        "num_mtp_layers": num_mtp_layers,
        "qkv_bias": arch in ("qwen2", "gpt2") or "blk.0.attn_q.bias" in tensor_shapes,
        "o_bias": "blk.0.attn_output.bias" in tensor_shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in tensor_shapes,
        "head_bias": "output.bias" in tensor_shapes,
        "tie_word_embeddings": "output.weight" not in tensor_shapes,
        "bos_token_id": fields.optional_integer("tokenizer.ggml.bos_token_id", minimum=0),
        "eos_token_ids": _eos_token_ids(fields),
        "pad_token_id": fields.optional_integer("tokenizer.ggml.padding_token_id", minimum=0),
    }
    return ModelConfig(**shared | family_fields(fields, arch, num_layers, head_dim, tensor_shapes))


def _vocab_size(fields: Fields, arch: str, tensor_shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Rows of the embedding: the tensors decide; the keys agree, or name fewer tokens where rows are padded."""
    shape = tensor_shapes.get("token_embd.weight")
    if shape is None:
        raise ConfigError(
            f"the GGUF file has no token_embd.weight among its {len(tensor_shapes)} tensors; use a full model"
        )
    rows = shape[0]
    stated = fields.integer(f"{arch}.vocab_size", rows)
    num_tokens = len(fields.raw("tokenizer.ggml.tokens", []))
    if stated != rows or num_tokens > rows:
        raise ConfigError(
            f"token_embd.weight has {rows} rows, but {arch}.vocab_size is {stated} and the vocabulary holds "
            f"{num_tokens} tokens; they must agree: fetch the file again"
        )
    return rows


def _check_equal(fields: Fields, key: str, head_dim: int) -> None:
    if (size := fields.integer(key, head_dim)) != head_dim:
        raise ConfigError(f"{key} must equal the head size {head_dim}, got {size}; use a supported model")


def _mla(fields: Fields, arch: str) -> MlaConfig:
    turning = fields.integer(f"{arch}.rope.dimension_count")
    whole = fields.integer(f"{arch}.attention.key_length_mla")
    if whole <= turning:
        raise ConfigError(f"{arch}.attention.key_length_mla={whole} must exceed {arch}.rope.dimension_count={turning}")
    return MlaConfig(
        q_lora_rank=fields.optional_integer(f"{arch}.attention.q_lora_rank"),
        kv_lora_rank=fields.integer(f"{arch}.attention.kv_lora_rank"),
        nope_head_dim=whole - turning,
        rope_head_dim=turning,
        v_head_dim=fields.integer(f"{arch}.attention.value_length_mla"),
    )


def _rope(
    fields: Fields,
    arch: str,
    head_dim: int,
    tensors: Mapping[str, Sequence[float]],
    tensor_shapes: Mapping[str, tuple[int, ...]],
) -> RopeConfig:
    key = f"{arch}.rope.scaling"
    turning = fields.integer(f"{arch}.rope.dimension_count", head_dim)
    if turning != head_dim and arch not in PARTIAL:
        _check_equal(fields, f"{arch}.rope.dimension_count", head_dim)
    theta = fields.positive(f"{arch}.rope.freq_base", 10000.0)
    common: dict[str, Any] = {"theta": theta, "partial_factor": turning / head_dim}
    kind = fields.text(f"{key}.type", "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ConfigError(f"rope scaling {kind!r} is not supported; supported: none, linear, yarn and rope tensors")

    def values_of(name: str) -> tuple[float, ...]:
        values = tensors.get(name)
        if values is None or len(values) != turning // 2 or not all(0 < value < 1e9 for value in values):
            raise ConfigError(
                f"{name} must hold {turning // 2} positive numbers for a head that turns {turning} features, "
                f"got {values!r:.200}; fetch the file again"
            )
        return tuple(float(value) for value in values)

    if ROPE_DIVISORS in tensor_shapes:
        return RopeConfig(**common, divisors=values_of(ROPE_DIVISORS))
    original = fields.optional_integer(f"{key}.original_context_length") or fields.integer(f"{arch}.context_length")
    if LONG_FACTORS in tensor_shapes:
        return longrope(
            common,
            original=original,
            stretch=fields.integer(f"{arch}.context_length") / original,
            attention_factor=fields.optional_positive(f"{key}.attn_factor"),
            long=values_of(LONG_FACTORS),
            short=values_of(SHORT_FACTORS),
        )
    # Old converters wrote the factor without naming its type.
    factor = fields.positive(f"{key}.factor", fields.positive(f"{arch}.rope.scale_linear", 1.0))
    if kind == "yarn":
        # DeepSeek's files fold their two magnitudes into the scale of scores (gguf_families.py).
        is_folded = f"{key}.yarn_log_multiplier" in fields
        magnitude = 1.0 if is_folded or factor <= 1 else 0.1 * math.log(factor) + 1
        return RopeConfig(
            **common,
            kind="yarn",
            factor=factor,
            beta_fast=fields.positive(f"{key}.yarn_beta_fast", 32.0),
            beta_slow=fields.positive(f"{key}.yarn_beta_slow", 1.0),
            original_max_position_embeddings=original,
            attention_factor=fields.positive(f"{key}.attn_factor", magnitude),
        )
    return RopeConfig(**common, kind="linear", factor=factor) if factor != 1.0 else RopeConfig(**common)


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    """All ids that end a turn: Llama 3 files name its end of turn and end of message apart from the end of text."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(id for key in keys for id in fields.token_ids(f"tokenizer.ggml.{key}")))
