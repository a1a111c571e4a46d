"""Host. The config.json of a trained draft head, read beside the names and shapes of its tensors.

Published files leave much unsaid, and runtimes disagree on the rest; every choice made here is logged.
"""

import itertools
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxspec.config.fields import Fields
from jaxspec.config.heads import (
    HeadConfig,
    MedusaConfig,
    MlpSpeculatorConfig,
    MtpConfig,
    MtpLayout,
)
from jaxspec.config.hf_dflash import dflash_config
from jaxspec.config.hf_eagle import LABEL, Shapes, chose, eagle_config
from jaxspec.config.model import ModelConfig
from jaxspec.errors import ConfigError

logger = logging.getLogger(__name__)


def head_config(
    kind: str,
    config: Mapping[str, Any],
    shapes: Shapes,
    target: ModelConfig,
    *,
    aux_layer_ids: tuple[int, ...] | None = None,
    mask_token_id: int | None = None,
) -> HeadConfig:
    """What a drafter's folder describes.

    Args:
      kind: "eagle", "eagle3", "p_eagle", "medusa", "mlp_speculator", "dflash", "dspark" or "mtp" (config and shapes are
        then the target's).
      config: the parsed config.json.
      shapes: of every tensor.
      target: the model it drafts for.
      aux_layer_ids: the target's streams to read, in place of what the config says.
      mask_token_id: of a parallel drafter, likewise.

    Raises:
      ConfigError: a kind or option that is not supported, a missing key, or what cannot draft for this target.
    """
    readers: dict[str, Callable[[], HeadConfig]] = {
        "eagle": lambda: eagle_config("eagle", config, shapes, target, aux_layer_ids),
        "eagle3": lambda: eagle_config("eagle3", config, shapes, target, aux_layer_ids),
        "p_eagle": lambda: eagle_config("p_eagle", config, shapes, target, aux_layer_ids, mask_token_id),
        "medusa": lambda: _medusa(config, shapes, target),
        "mlp_speculator": lambda: _mlp_speculator(config, shapes, target),
        "dflash": lambda: dflash_config("dflash", config, shapes, target, aux_layer_ids, mask_token_id),
        "dspark": lambda: dflash_config("dspark", config, shapes, target, aux_layer_ids, mask_token_id),
        "mtp": lambda: _mtp(shapes, target),
    }
    if kind not in readers:
        raise ConfigError(f"draft heads of kind {kind!r} are not supported; supported: {', '.join(readers)}")
    return readers[kind]()


# Medusa and the MLP speculator

_MEDUSA = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
_MEDUSA_VLLM = re.compile(r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")


def _medusa(config: Mapping[str, Any], shapes: Shapes, target: ModelConfig) -> MedusaConfig:
    """Heads and blocks are counted from the tensors: the published config of a five-head file says two."""
    fields = Fields(config, LABEL)
    blocks: dict[tuple[int, int], tuple[int, ...]] = {}
    for name, shape in shapes.items():
        match = _MEDUSA_VLLM.fullmatch(name) or _MEDUSA.fullmatch(name)
        is_block = match is not None and (match.re is _MEDUSA_VLLM or match[3])
        if match is not None and is_block and name.endswith(".weight"):
            blocks[int(match[1]), int(match[2])] = shape
    if not blocks:
        raise ConfigError("a Medusa checkpoint needs tensors '0.0.linear.weight' or 'blocks.0.layers.0.weight', found "
                          f"{sorted(shapes)[:3]}; fetch it again")  # fmt: skip
    num_heads, num_blocks = (1 + max(key[axis] for key in blocks) for axis in (0, 1))
    for keys, count in ((("medusa_num_heads", "num_heads"), num_heads), (("medusa_num_layers",), num_blocks)):
        stated = next((fields.raw(key) for key in keys if key in fields), count)
        if stated != count:
            logger.warning("draft head: config says %s=%s, the file has %d; the tensors win", keys[0], stated, count)
    hidden_size = next(iter(blocks.values()))[-1]
    if hidden_size != target.hidden_size:
        raise ConfigError(f"the Medusa heads are {hidden_size} wide, the target {target.hidden_size}; take heads that "
                          "were trained for this target")  # fmt: skip
    own: Literal["each", "one", "none"] = "each"
    if not any(_is_medusa_head(name) for name in shapes):
        own = "one" if any(name.endswith("lm_head.weight") for name in shapes) else "none"
    has_map = any(name.endswith("token_map") for name in shapes)
    truncated = fields.optional_integer("truncated_vocab_size")
    size = target.vocab_size if truncated is None or not has_map else truncated
    return MedusaConfig(
        num_heads=num_heads,
        num_blocks=num_blocks,
        hidden_size=hidden_size,
        draft_vocab_size=size,
        has_bias=any(name.endswith(("linear.bias", "layers.0.bias")) for name in shapes),
        own_heads=chose("vocabulary heads", own, "as stored"),
        has_map=has_map,
        logit_scale=fields.positive("logit_scale", 1.0),
    )


def _is_medusa_head(name: str) -> bool:
    match = _MEDUSA.fullmatch(name)
    return (match is not None and not match[3]) or re.fullmatch(
        r"(medusa_heads\.)?lm_heads\.\d+\.weight", name
    ) is not None


def _mlp_speculator(config: Mapping[str, Any], shapes: Shapes, target: ModelConfig) -> MlpSpeculatorConfig:
    fields = Fields(config, LABEL)
    if "sum_lstm" in (fields.raw("method"), fields.raw("model_type")) or any("forget_" in name for name in shapes):
        raise ConfigError(
            "the LSTM form of the MLP speculator is not supported; take an 'mlp_speculator' of IBM's kind"
        )
    hidden_size = fields.integer("emb_dim")
    if (hidden_size, fields.integer("vocab_size")) != (target.hidden_size, target.vocab_size):
        raise ConfigError(
            f"the speculator reads states {hidden_size} wide over {fields.raw('vocab_size')} tokens, the target has "
            f"{target.hidden_size} and {target.vocab_size}; take the one trained for this target"
        )
    return MlpSpeculatorConfig(
        hidden_size=hidden_size,
        inner_size=fields.integer("inner_dim", 0, minimum=0) or hidden_size,
        num_steps=fields.integer("n_predict"),
        vocab_size=target.vocab_size,
        is_tied=fields.flag("tie_weights", False),
        scale_input=fields.flag("scale_input", False),
    )


# Multi-token prediction


def _mtp(shapes: Shapes, target: ModelConfig) -> MtpConfig:
    """A target's own modules, told by their tensors' names; their layers are of the target's kind."""
    n = target.num_layers
    outer = target.tensor_prefix.removesuffix("model.")
    # layout: (prefix, number of the first module, a tensor that module i has)
    layouts: dict[MtpLayout, tuple[str, int, str]] = {
        "nextn": (f"{target.tensor_prefix}layers.", n, "{i}.eh_proj.weight"),
        "mtp": (f"{outer}mtp.", 0, "layers.{i}.input_layernorm.weight"),
        "ernie": (f"{target.tensor_prefix}mtp_", 0, "linear_proj.{i}.weight"),
        "mimo": (f"{target.tensor_prefix}mtp_layers.", 0, "{i}.input_proj.weight"),
    }
    found: list[MtpLayout] = [
        layout for layout, (prefix, first, proof) in layouts.items() if prefix + proof.format(i=first) in shapes
    ]
    if not found:
        raise ConfigError(
            "method 'mtp' needs a target whose checkpoint holds a multi-token-prediction module, found none of "
            f"{', '.join(prefix + proof.format(i=first) for prefix, first, proof in layouts.values())}; take the "
            "original checkpoint (many copies leave the module out) or another method"
        )
    layout = found[0]
    prefix, first, proof = layouts[layout]
    num_modules = next(count for count in itertools.count(1) if prefix + proof.format(i=first + count) not in shapes)
    if target.num_mtp_layers not in (0, num_modules):
        logger.warning(
            "draft head: config says %d MTP modules, the files hold %d; the files win",
            target.num_mtp_layers,
            num_modules,
        )
    own = tuple(f"{prefix}{first + i}." for i in range(num_modules)) if layout in ("nextn", "mimo") else (prefix,)
    is_expert = any(name.startswith(own) and ".experts." in name for name in shapes)
    if layout == "mtp" and is_expert:
        raise ConfigError("an MTP module of Qwen's kind with experts is not supported; use another method")
    moe = target.moe.model_copy(update={"layers": (True,) * num_modules}) if target.moe and is_expert else None
    values: dict[str, Any] = {
        "num_layers": num_modules,
        "moe": moe,
        "sliding_window_layers": (None,) * num_modules,
        "tie_word_embeddings": False,
    }
    if layout == "mtp" and target.rope is not None:
        values |= {
            "rope": target.rope.model_copy(update={"partial_factor": 0.25}),
            "qk_norm": True,
            "qkv_bias": f"{prefix}layers.0.self_attn.q_proj.bias" in shapes,
            "o_bias": False,
        }
    # MiMo's own code hands its modules the state before the final norm; SGLang the one behind it.
    streams = chose("streams", (n,), "before the target's final norm") if layout == "mimo" else ()
    return MtpConfig(
        layout=chose("module", layout, f"{num_modules} of tensors {', '.join(name + '*' for name in own)}"),
        model=target.model_copy(update=values),
        prefix=prefix,
        first=first,
        has_embed=f"{own[0]}embed_tokens.weight" in shapes,
        has_head=f"{own[0]}shared_head.head.weight" in shapes,
        fc_bias=layout == "ernie" and f"{prefix}linear_proj.0.bias" in shapes,
        aux_streams=streams,
    )
