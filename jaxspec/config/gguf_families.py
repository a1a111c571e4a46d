"""Host. What sets one GGUF architecture's keys apart: windows, softcaps, scales and experts."""

import math
from collections.abc import Mapping
from typing import Any

from jaxspec.config.fields import Fields
from jaxspec.config.model import MoeConfig, RopeConfig
from jaxspec.errors import ConfigError

# Architecture -> family. "llama" also covers Mistral, and Mixtral where the file has experts.
FAMILIES = {
    "llama": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "phi3": "phi3",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "gpt2": "gpt2",
    "qwen3moe": "qwen3_moe",
    "deepseek2": "deepseek_v3",
    "glm4moe": "glm4_moe",
    "ernie4_5-moe": "ernie4_5_moe",
}
# Rows stand in interleaved pairs: permuted by llama.cpp's converter ("llama"), or so in the original.
INTERLEAVED = ("llama", "deepseek2", "ernie4_5-moe")
_SIGMOID = 2  # of expert_gating_func; 1 is softmax

Shapes = Mapping[str, tuple[int, ...]]


def family_fields(fields: Fields, arch: str, num_layers: int, head_dim: int, shapes: Shapes) -> dict[str, Any]:
    """The fields of ModelConfig that this architecture reads its own way."""
    own: dict[str, Any] = {
        "family": FAMILIES[arch],
        "qk_norm": "blk.0.attn_q_norm.weight" in shapes or arch == "qwen3",
        "sliding_window_layers": _sliding_windows(fields, arch, num_layers),
        "moe": _moe(fields, arch, num_layers, shapes),
    }
    if arch == "llama" and own["moe"] is not None:
        own["family"] = "mixtral"
    if arch in ("gemma2", "gemma3"):
        own |= _gemma(fields, arch, num_layers, head_dim)
    if arch == "deepseek2":
        log_multiplier = fields.raw(f"{arch}.rope.scaling.yarn_log_multiplier", 0.0)
        factor = fields.positive(f"{arch}.rope.scaling.factor", 1.0)
        own["attention_scale"] = head_dim**-0.5 * (1 + log_multiplier * math.log(factor)) ** 2
    return own


def _sliding_windows(fields: Fields, arch: str, num_layers: int) -> tuple[int | None, ...]:
    key = f"{arch}.attention.sliding_window"
    # Zero stands for none (Phi-4).
    window = fields.integer(key, 0, minimum=0) or None if arch in ("llama", "phi3", "gemma2", "gemma3") else None
    if arch not in ("gemma2", "gemma3"):
        return (window,) * num_layers
    pattern = fields.raw(f"{key}_pattern", 2 if arch == "gemma2" else 6)
    if isinstance(pattern, list) and len(pattern) == num_layers:
        return tuple(window if slides else None for slides in pattern)
    if type(pattern) is not int or pattern < 1:
        raise ConfigError(f"{key}_pattern must be a number or {num_layers} flags, got {pattern!r:.100}")
    return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))


def _gemma(fields: Fields, arch: str, num_layers: int, head_dim: int) -> dict[str, Any]:
    hidden_size, num_heads = fields.integer(f"{arch}.embedding_length"), fields.integer(f"{arch}.attention.head_count")
    # The file does not say query_pre_attn_scalar: it is the head size but in the two models of 27 billion.
    scalar = hidden_size / num_heads if num_layers == (46 if arch == "gemma2" else 62) else head_dim
    softcap = f"{arch}.attn_logit_softcapping"
    own: dict[str, Any] = {
        "attention_scale": fields.positive(f"{arch}.attention.scale", scalar**-0.5),
        "attention_softcap": fields.positive(softcap, 50.0) if arch == "gemma2" else fields.optional_positive(softcap),
        "logit_softcap": fields.positive(f"{arch}.final_logit_softcapping", 30.0)
        if arch == "gemma2"
        else fields.optional_positive(f"{arch}.final_logit_softcapping"),
    }
    if arch == "gemma3":
        own["local_rope"] = RopeConfig(theta=fields.positive(f"{arch}.rope.freq_base_swa", 10000.0))
    return own


def _moe(fields: Fields, arch: str, num_layers: int, shapes: Shapes) -> MoeConfig | None:
    """The tensors say which layers have experts, and how wide they are."""
    layers = tuple(f"blk.{layer}.ffn_gate_inp.weight" in shapes for layer in range(num_layers))
    if not any(layers):
        if fields.raw(f"{arch}.expert_count", 0):
            raise ConfigError(f"{arch}.expert_count names experts, but no layer has a router; fetch the file again")
        return None
    first = f"blk.{layers.index(True)}."
    stacked = shapes.get(f"{first}ffn_gate_exps.weight", ())
    if len(stacked) != 3:
        raise ConfigError(
            f"{first}ffn_gate_exps.weight must be a stack of experts, got {list(stacked)}; convert the file again"
        )
    shared = shapes.get(f"{first}ffn_gate_shexp.weight", (0,))
    has_bias = f"{first}exp_probs_b.bias" in shapes
    gating = fields.raw(f"{arch}.expert_gating_func", _SIGMOID if has_bias and arch != "ernie4_5-moe" else 1)
    num_groups = fields.integer(f"{arch}.expert_group_count", 1)
    if num_groups > 1 and gating != _SIGMOID:
        raise ConfigError(f"expert groups need expert_gating_func {_SIGMOID}, got {gating!r}; use a supported model")
    return MoeConfig(
        layers=layers,
        num_experts=fields.integer(f"{arch}.expert_count"),
        num_experts_per_token=fields.integer(f"{arch}.expert_used_count"),
        intermediate_size=stacked[1],
        shared_intermediate_size=shared[0],
        score="sigmoid" if gating == _SIGMOID else "softmax",
        has_correction_bias=has_bias,
        num_groups=num_groups,
        num_kept_groups=fields.integer(f"{arch}.expert_group_used_count", 1),
        renormalize=arch in ("llama", "qwen3moe", "ernie4_5-moe") or fields.flag(f"{arch}.expert_weights_norm", False),
        scale=fields.positive(f"{arch}.expert_weights_scale", 1.0),
    )
