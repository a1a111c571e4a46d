"""Host. GGUF metadata, as a plain dict, read into a ModelConfig."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.config.fields import Fields, check_heads
from jaxspec.config.model import ModelConfig, RopeConfig
from jaxspec.errors import ConfigError

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # "llama" also covers Mistral
ROPE_DIVISORS_NAME = "rope_freqs.weight"


def model_config_from_gguf(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_divisors: Sequence[float] | None = None,
) -> ModelConfig:
    """What the file's keys and tensor table describe.

    Args:
      metadata: the file's keys.
      tensor_shapes: {tensor name: shape}, [out, in]. Biases and a head of its own are known only from here.
      rope_divisors: the values of rope_freqs.weight, where the file has it: Llama 3's scaling lives in it alone.

    Raises:
      ConfigError: an unsupported architecture or option, a missing key, or keys that contradict the tensors.
    """
    fields = Fields(metadata, "the GGUF metadata")
    arch = fields.text("general.architecture")
    if arch not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"GGUF architecture {arch!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if (experts := fields.raw(f"{arch}.expert_count", 0)) != 0:
        raise ConfigError(f"mixture-of-experts models are not supported yet, got {experts} experts; use a dense model")

    num_heads = fields.integer(f"{arch}.attention.head_count")
    num_kv_heads = fields.integer(f"{arch}.attention.head_count_kv", num_heads)
    hidden_size = fields.integer(f"{arch}.embedding_length")
    head_dim = fields.integer(f"{arch}.attention.key_length", max(1, hidden_size // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := fields.integer(f"{arch}.{key}", head_dim)) != head_dim:
            raise ConfigError(f"{arch}.{key} must equal the head size {head_dim}, got {size}; use a supported model")
    check_heads(fields.label, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)

    num_layers = fields.integer(f"{arch}.block_count")
    window = fields.optional_integer(f"{arch}.attention.sliding_window") if arch == "llama" else None
    return ModelConfig(
        family="llama",
        model_type=arch,
        vocab_size=_vocab_size(fields, arch, tensor_shapes),
        hidden_size=hidden_size,
        intermediate_size=fields.integer(f"{arch}.feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer(f"{arch}.context_length"),
        rms_norm_eps=fields.positive(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope=_rope(fields, arch, head_dim, rope_divisors, ROPE_DIVISORS_NAME in tensor_shapes),
        sliding_window_layers=(window,) * num_layers,
        qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in tensor_shapes,
        o_bias="blk.0.attn_output.bias" in tensor_shapes,
        mlp_bias="blk.0.ffn_up.bias" in tensor_shapes,
        qk_norm=arch == "qwen3",
        tie_word_embeddings="output.weight" not in tensor_shapes,
        bos_token_id=fields.optional_integer("tokenizer.ggml.bos_token_id", minimum=0),
        eos_token_ids=_eos_token_ids(fields),
        pad_token_id=fields.optional_integer("tokenizer.ggml.padding_token_id", minimum=0),
    )


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


def _rope(fields: Fields, arch: str, head_dim: int, divisors: Sequence[float] | None, has_divisors: bool) -> RopeConfig:
    theta = fields.positive(f"{arch}.rope.freq_base", 10000.0)
    kind = fields.text(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ConfigError(f"rope scaling {kind!r} is not supported; supported: none, linear and {ROPE_DIVISORS_NAME}")
    if has_divisors:
        if divisors is None or len(divisors) != head_dim // 2 or not all(0 < value < 1e9 for value in divisors):
            raise ConfigError(
                f"{ROPE_DIVISORS_NAME} must hold {head_dim // 2} positive numbers for a head size of {head_dim}, "
                f"got {divisors!r:.200}; fetch the file again"
            )
        return RopeConfig(theta=theta, divisors=tuple(float(value) for value in divisors))
    # Old converters wrote the factor without naming its type.
    factor = fields.positive(f"{arch}.rope.scaling.factor", fields.positive(f"{arch}.rope.scale_linear", 1.0))
    return RopeConfig(theta=theta, kind="linear", factor=factor) if factor != 1.0 else RopeConfig(theta=theta)


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    """All ids that end a turn: Llama 3 files name its end of turn and end of message apart from the end of text."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(id for key in keys for id in fields.token_ids(f"tokenizer.ggml.{key}")))
