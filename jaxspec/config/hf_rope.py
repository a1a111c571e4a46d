"""Host. The rotary embedding a config.json describes, in the style of transformers 4 or 5."""

import logging
import math
from typing import Any

from jaxspec.config.fields import Fields
from jaxspec.config.model import RopeConfig
from jaxspec.errors import ConfigError

logger = logging.getLogger(__name__)

SUPPORTED_ROPE = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
DEFAULT_THETA = {"mixtral": 1e6, "ernie4_5_moe": 5e5, "gemma3_text": 1e6}
HALF_TURNING = ("glm4_moe",)  # partial_rotary_factor is 0.5 where the file says nothing
PARTIAL = ("glm4_moe", "phi3")
_LABEL = "the rope parameters of config.json"


def read_rope(fields: Fields, model_type: str, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """(rope, rope of the sliding layers where it differs) of heads whose first `head_dim` features may turn.

    transformers 4 writes rope_theta beside rope_scaling; transformers 5 both inside rope_parameters, which may hold one
    set for each type of layer.
    """
    sets = _parameter_sets(fields)
    ropes = {kind: _read_one(fields, Fields(values, _LABEL), model_type, head_dim) for kind, values in sets.items()}
    if model_type != "gemma3_text":
        first, *others = ropes.values()
        if any(rope != first for rope in others):
            raise ConfigError(f"rope_parameters that differ by layer type are not supported, got {sorted(sets)}")
        return first, None
    # Gemma 3's scaling is for its full layers alone.
    local = ropes.get("sliding_attention") or RopeConfig(theta=fields.positive("rope_local_base_freq", 10000.0))
    return ropes.get("full_attention") or ropes.get("") or RopeConfig(theta=DEFAULT_THETA["gemma3_text"]), local


def _parameter_sets(fields: Fields) -> dict[str, Any]:
    """{layer type: parameters}; one set for all layers is under ""."""
    values = fields.raw("rope_parameters", fields.raw("rope_scaling", {}))
    if isinstance(values, dict) and values and all(isinstance(value, dict) for value in values.values()):
        return values
    return {"": values}


def _read_one(fields: Fields, rope: Fields, model_type: str, head_dim: int) -> RopeConfig:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if model_type == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # its names in older files
    if kind not in SUPPORTED_ROPE:
        raise ConfigError(f"rope type {kind!r} is not supported; supported: {', '.join(SUPPORTED_ROPE)}")
    default_share = 0.5 if model_type in HALF_TURNING else 1.0
    partial = rope.positive("partial_rotary_factor", fields.positive("partial_rotary_factor", default_share))
    if partial > 1 or (partial != 1 and model_type not in PARTIAL and kind != "proportional"):
        raise ConfigError(f"partial_rotary_factor must be 1 for {model_type}, got {partial}; use a supported model")
    dim = head_dim if kind == "proportional" else int(head_dim * partial)
    if dim < 2 or dim % 2:
        raise ConfigError(f"{dim} of {head_dim} features cannot turn in pairs; correct head_dim or {partial=}")
    theta = rope.positive("rope_theta", fields.positive("rope_theta", DEFAULT_THETA.get(model_type, 10000.0)))
    common: dict[str, Any] = {"theta": theta, "partial_factor": partial}
    if kind == "dynamic":
        # It changes frequencies only past max_position_embeddings, where no row here ever comes.
        rope.positive("factor")
        logger.info(
            "rope type dynamic: as default, within the model's %s positions", fields.raw("max_position_embeddings")
        )
        return RopeConfig(**common)
    if kind == "default":
        return RopeConfig(**common)
    if kind in ("linear", "proportional"):
        factor = rope.positive("factor", 1.0 if kind == "proportional" else None)
        return RopeConfig(**common, kind="linear" if kind == "linear" else "proportional", factor=factor)
    if kind == "llama3":
        return _llama3(fields, rope, common)
    return _longrope(fields, rope, common, dim // 2) if kind == "longrope" else _yarn(fields, rope, common)


def _original_length(fields: Fields, rope: Fields) -> int:
    key = "original_max_position_embeddings"
    return rope.optional_integer(key) or fields.optional_integer(key) or fields.integer("max_position_embeddings")


def _llama3(fields: Fields, rope: Fields, common: dict[str, Any]) -> RopeConfig:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if low >= high:
        raise ConfigError(f"low_freq_factor {low} must be below high_freq_factor {high}; correct config.json")
    return RopeConfig(
        **common,
        kind="llama3",
        factor=rope.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_original_length(fields, rope),
    )


def yarn_magnitude(factor: float, mscale: float) -> float:
    """How much longer vectors make up for flatter scores. Source: Peng et al. 2023, eq. 22, and DeepSeek-V2's code."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(fields: Fields, rope: Fields, common: dict[str, Any]) -> RopeConfig:
    original = _original_length(fields, rope)
    factor = rope.positive("factor", fields.integer("max_position_embeddings") / original)
    attention_factor = rope.optional_positive("attention_factor")
    if attention_factor is None:
        mscale, all_dim = rope.raw("mscale", 0), rope.raw("mscale_all_dim", 0)
        if mscale and all_dim:
            attention_factor = yarn_magnitude(factor, rope.positive("mscale")) / yarn_magnitude(
                factor, rope.positive("mscale_all_dim")
            )
        else:
            attention_factor = yarn_magnitude(factor, 1.0)
    return RopeConfig(
        **common,
        kind="yarn",
        factor=factor,
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
    )


def _longrope(fields: Fields, rope: Fields, common: dict[str, Any], pairs: int) -> RopeConfig:
    # Phi-3 keeps the original length beside its rope parameters, and that one wins.
    original = fields.optional_integer("original_max_position_embeddings") or rope.integer(
        "original_max_position_embeddings", fields.integer("max_position_embeddings")
    )
    return longrope(
        common,
        original=original,
        stretch=rope.positive("factor", fields.integer("max_position_embeddings") / original),
        attention_factor=rope.optional_positive("attention_factor"),
        long=_factors(rope, "long_factor", pairs),
        short=_factors(rope, "short_factor", pairs),
    )


def longrope(
    common: dict[str, Any],
    *,
    original: int,
    stretch: float,
    attention_factor: float | None,
    long: tuple[float, ...],
    short: tuple[float, ...],
) -> RopeConfig:
    """Longrope's two sets of factors. Source: Ding et al. 2024; the attention factor is Phi-3's."""
    if attention_factor is None:
        attention_factor = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return RopeConfig(
        **common,
        divisors=long,
        short_divisors=short,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
    )


def _factors(rope: Fields, key: str, pairs: int) -> tuple[float, ...]:
    values = rope.raw(key)
    if (
        not isinstance(values, list)
        or len(values) != pairs
        or not all(type(value) in (int, float) and 0 < value < 1e9 for value in values)
    ):
        raise ConfigError(f"{key} of {_LABEL} must hold {pairs} positive numbers, got {values!r:.200}; correct it")
    return tuple(float(value) for value in values)
