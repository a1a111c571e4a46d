"""Host. The config.json of an EAGLE or EAGLE-3 head, from any of the projects that export them.

Published files leave much unsaid, and runtimes disagree on the rest; every choice made here is logged.
"""

import logging
from collections.abc import Mapping
from typing import Any, Literal

from jaxspec.config.detect import mask_token_of
from jaxspec.config.fields import Fields
from jaxspec.config.heads import EagleConfig
from jaxspec.config.hf import model_config_from_hf
from jaxspec.config.model import ModelConfig
from jaxspec.errors import ConfigError

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]  # of the tensors in the file, by name
LABEL = "the draft head's config.json"
_NUM_STREAMS = 3
_LEGACY_FC_NORMS = {"aux_norm_low": 0, "aux_norm_mid": 1, "aux_norm_high": 2}


def canonical(name: str) -> str:
    """A tensor's name without what exporters put around it: "model." in front, "midlayer" for layer 0."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    for legacy, index in _LEGACY_FC_NORMS.items():
        if name == f"{legacy}.weight":
            return f"fc_norm.{index}.weight"
    return name


def chose(key: str, value: Any, because: str) -> Any:
    logger.info("draft head: %s: %s (%s)", key, value, because)
    return value


def nested_fields(config: Mapping[str, Any], key: str) -> Fields:
    """A nested object of the config; empty where it is absent."""
    nested = config.get(key)
    return Fields(nested if isinstance(nested, Mapping) else {}, f"{key} of {LABEL}")


def eagle_config(
    kind: Literal["eagle", "eagle3", "p_eagle"],
    config: Mapping[str, Any],
    shapes: Shapes,
    target: ModelConfig,
    aux_layer_ids: tuple[int, ...] | None,
    mask_token_id: int | None = None,
) -> EagleConfig:
    """Also of P-EAGLE, whose config is EAGLE-3's and names a mask token."""
    known = {canonical(name): shape for name, shape in shapes.items()}
    is_speculators = "speculators_model_type" in config
    fields, nested = Fields(config, LABEL), nested_fields(config, "eagle_config")
    model = _decoder(config, known, is_speculators)
    fc = known.get("fc.weight")
    draft_vocab_size = fields.integer(
        "draft_vocab_size", fields.optional_integer("truncated_vocab_size") or model.vocab_size
    )
    has_head = "lm_head.weight" in known
    is_tied = fields.flag("tie_word_embeddings", False)
    if is_tied and draft_vocab_size < model.vocab_size:
        if not has_head:
            raise ConfigError(
                f"tie_word_embeddings cannot make a head of {draft_vocab_size} tokens out of an embedding of "
                f"{model.vocab_size}, and there is no lm_head.weight; correct the draft head's config.json"
            )
        is_tied = chose("lm_head", False, "stored, and smaller than the embedding it would be tied to")
    id_map: Literal["d2t", "token_map"] | None = next((key for key in ("d2t", "token_map") if key in known), None)
    check_vocabulary(model, target, draft_vocab_size, has_head or is_tied, id_map)
    values: dict[str, Any] = {
        "kind": "eagle" if kind == "eagle" else "eagle3",
        "model": model,
        "draft_vocab_size": draft_vocab_size,
        "has_embed": "embed_tokens.weight" in known,
        "has_head": has_head and not is_tied,
        "is_head_tied": is_tied,
        "id_map": id_map,
        "fc_bias": _fc_bias(fields, known),
        "logit_scale": fields.positive("logit_scale", 1.0),
        "is_later_norm_hidden_norm": "layers.1.hidden_norm.weight" in known,
        "target_hidden_size": target.hidden_size,
    }
    if not values["has_embed"] and model.hidden_size != target.hidden_size:
        raise ConfigError(
            f"the draft head is {model.hidden_size} wide, the target {target.hidden_size}, so it cannot use the "
            "target's embedding, and has no embed_tokens.weight; fetch the head for this target"
        )
    if kind == "eagle":
        if model.hidden_size != target.hidden_size:
            raise ConfigError(
                f"an EAGLE head must be as wide as its target: {model.hidden_size} against {target.hidden_size}; "
                "take the head trained for this target"
            )
        values["has_first_norm"] = "layers.0.input_layernorm.weight" in known
        values["has_final_norm"] = "norm.weight" in known
        return EagleConfig(**values)

    stated = fields.optional_integer("target_hidden_size")
    if stated is not None and stated != target.hidden_size:
        raise ConfigError(
            f"the draft head reads states {stated} wide (target_hidden_size), the target's are {target.hidden_size}; "
            "take the head trained for this target"
        )
    reads_streams = nested.flag("use_aux_hidden_state", fields.flag("use_aux_hidden_state", True))
    if reads_streams:
        values["aux_streams"] = _aux_streams(fields, nested, target, aux_layer_ids, is_speculators)
        wanted = (model.hidden_size, len(values["aux_streams"]) * target.hidden_size)
        if fc is not None and tuple(fc) != wanted:
            raise ConfigError(
                f"fc.weight {list(fc)} does not read {len(values['aux_streams'])} streams {target.hidden_size} wide "
                f"into {model.hidden_size} ({list(wanted)}); take the head trained for this target"
            )
    elif model.hidden_size != target.hidden_size:
        raise ConfigError(
            f"without use_aux_hidden_state the head must be as wide as its target: {model.hidden_size} against "
            f"{target.hidden_size}; take the head trained for this target"
        )
    default = is_speculators and config.get("speculators_model_type") == "eagle3"
    if "norm_before_residual" not in fields:
        chose("norm_before_residual", default, "absent: true in the speculators format, false elsewhere")
    values["norm_before_residual"] = fields.flag("norm_before_residual", default)
    values["norm_before_fc"] = reads_streams and nested.flag("norm_before_fc", fields.flag("norm_before_fc", False))
    values["fc_norm"] = reads_streams and (fields.flag("fc_norm", False) or fields.flag("use_aux_norm", False))
    if values["norm_before_fc"] and values["fc_norm"]:
        raise ConfigError("norm_before_fc and fc_norm exclude each other; correct the draft head's config.json")
    values["norm_output"] = _norm_output(fields, values["fc_norm"], is_speculators)
    if kind == "p_eagle":
        if "mask_hidden" not in known:
            raise ConfigError(
                "an EAGLE-3 head that drafts in one pass needs the tensor 'mask_hidden', which the checkpoint lacks; "
                "take a P-EAGLE head, or leave out parallel_drafting"
            )
        values["mask_token_id"] = chose("mask token", mask_token_of(config, mask_token_id), "in place of drafts")
    return EagleConfig(**values)


def _decoder(config: Mapping[str, Any], known: Shapes, is_speculators: bool) -> ModelConfig:
    """The layers' shape: from transformer_layer_config in the speculators format, from "model" in vLLM's old one."""
    values = dict(config)
    if is_speculators:
        values = layer_config(config)
    elif isinstance(config.get("model"), Mapping):
        values = dict(config["model"])
    elif values.get("rope_scaling") and "rope_theta" in values:
        scaling = values["rope_scaling"]
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
        if kind in ("linear", "dynamic"):
            del values["rope_theta"]
            chose("rope_theta", 10000.0, f"EAGLE's own code takes this base wherever rope_scaling is {kind}")
    model_type = values.get("model_type")
    if model_type in (None, "eagle"):
        model_type = "llama"
    if model_type not in ("llama", "mistral", "qwen2", "qwen3"):
        raise ConfigError(
            f"EAGLE layers of model_type {model_type!r} are not supported; supported: llama, qwen2, qwen3"
        )
    values |= {"model_type": model_type, "architectures": None, "tie_word_embeddings": False}
    if model_type == "mistral":
        values.setdefault("sliding_window", None)
    model = model_config_from_hf(values, None, ["lm_head.weight"])
    # Whose biases a flag means differs between runtimes: what is stored is there, and q, k and v of the flag must be.
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    flag = values.get("attention_bias") is True or values.get("qkv_bias") is True
    return model.model_copy(
        update={
            "qkv_bias": flag or f"{attention}q_proj.bias" in known,
            "o_bias": f"{attention}o_proj.bias" in known,
            "mlp_bias": values.get("mlp_bias") is True or f"{mlp}down_proj.bias" in known,
        }
    )


def layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    values = config.get("transformer_layer_config")
    if not isinstance(values, Mapping):
        raise ConfigError(f"{LABEL} lacks transformer_layer_config, which its format needs; fetch the head again")
    return dict(values)


def _fc_bias(fields: Fields, known: Shapes) -> bool:
    """There is a bias where one is stored: the flag's default differs between runtimes."""
    is_stored = "fc.bias" in known
    flag = fields.raw("eagle_fc_bias", fields.raw("bias"))
    if isinstance(flag, bool) and flag != is_stored:
        logger.warning("draft head: config says bias %s, but fc.bias is %sstored; the tensors win", flag,
                       "" if is_stored else "not ")  # fmt: skip
    return is_stored


def check_vocabulary(
    model: ModelConfig, target: ModelConfig, draft_vocab_size: int, has_head: bool, id_map: str | None
) -> None:
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft head's vocabulary of {model.vocab_size} must equal the target's {target.vocab_size}; "
            "take the head trained for this target"
        )
    if draft_vocab_size > target.vocab_size:
        raise ConfigError(
            f"draft_vocab_size={draft_vocab_size} exceeds the vocabulary of {target.vocab_size}; correct config.json"
        )
    if draft_vocab_size < target.vocab_size:
        lacks = [name for name, is_there in (("d2t", id_map), ("lm_head.weight", has_head)) if not is_there]
        if lacks:
            raise ConfigError(
                f"a draft vocabulary of {draft_vocab_size} of the target's {target.vocab_size} tokens needs "
                f"{' and '.join(lacks)}, which the checkpoint lacks; fetch it again"
            )


def _aux_streams(
    fields: Fields, nested: Fields, target: ModelConfig, given: tuple[int, ...] | None, is_speculators: bool
) -> tuple[int, ...]:
    """Which of the target's streams the head reads. Two conventions for a list of ids are about: the streams' numbers,
    and the numbers of the layers that put them out."""
    key, n = "eagle_aux_hidden_state_layer_ids", target.num_layers
    stated = nested.raw(key, fields.raw(key))
    if given is not None:
        ids = chose("streams", given, "as the user says")
    elif stated is not None:
        if not isinstance(stated, list) or not stated or any(type(i) is not int for i in stated):
            raise ConfigError(f"{key} must list layer numbers, got {stated!r:.100}; correct the draft head's config")
        is_output = stated[0] == 1 and not is_speculators
        ids = tuple(i + is_output for i in stated)
        because = "a list from 1 on means the outputs of layers" if is_output else "as the config lists them"
        chose("streams", ids, f"{because}; override with eagle_aux_hidden_state_layer_ids")
    else:
        count = fields.integer("num_aux_hidden_states", _NUM_STREAMS)
        if count != _NUM_STREAMS:
            raise ConfigError(f"num_aux_hidden_states={count} needs {key}; the default names {_NUM_STREAMS} streams")
        ids = chose("streams", (2, n // 2, n - 3), f"absent: the default for {n} layers")
    if any(not 0 <= i <= n for i in ids):
        raise ConfigError(f"{key} {list(ids)} must lie in 0..{n}, the target's streams; set it to what was trained on")
    return ids


def _norm_output(fields: Fields, fc_norm: bool, is_speculators: bool) -> bool:
    flag = fields.flag("norm_output", False)
    architectures = fields.raw("architectures", [])
    if flag and not is_speculators and not fc_norm and "LlamaForCausalLMEagle3" in architectures:
        return chose("norm_output", False, "SpecForge writes it for the norm before the head, which is always there")
    return flag
