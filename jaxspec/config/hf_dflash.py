"""Host. The config.json of a DFlash or DSpark head, from any of the projects that export them.

Some write a head's own fields beside those of its layers, some in a nested object; the speculators format counts the
target's streams where the others count its layers.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from jaxspec.config.detect import mask_token_of
from jaxspec.config.fields import Fields
from jaxspec.config.heads import DflashConfig, MarkovKind
from jaxspec.config.hf import model_config_from_hf
from jaxspec.config.hf_eagle import LABEL, Shapes, canonical, check_vocabulary, chose, layer_config, nested_fields
from jaxspec.config.model import ModelConfig
from jaxspec.errors import ConfigError


def dflash_config(
    kind: Literal["dflash", "dspark"],
    config: Mapping[str, Any],
    shapes: Shapes,
    target: ModelConfig,
    aux_layer_ids: tuple[int, ...] | None,
    mask_token_id: int | None,
) -> DflashConfig:
    """Arguments as `head_config` takes them."""
    is_speculators = "speculators_model_type" in config
    nested = nested_fields(config, "dflash_config")
    inner = config.get("dflash_config")
    own = Fields({**config, **(inner if isinstance(inner, Mapping) else {})}, LABEL)
    known = {canonical(name): shape for name, shape in shapes.items()}
    model = _layers(config, nested, is_speculators)
    streams = _streams(own, target, model.num_layers, aux_layer_ids, is_speculators)
    draft_vocab_size = own.integer("draft_vocab_size", model.vocab_size)
    has_embed, has_head = "embed_tokens.weight" in known, "lm_head.weight" in known
    id_map = "d2t" if "d2t" in known else None
    # A draft may know more tokens than its target, masks among them; then it brings its embedding, and these are cut.
    is_wider = model.vocab_size > target.vocab_size
    if is_wider and not has_embed:
        raise ConfigError(
            f"a draft vocabulary of {model.vocab_size}, more than the target's {target.vocab_size}, needs "
            "embed_tokens.weight, which the checkpoint lacks; fetch it again, or take the head for this target"
        )
    read_as = model.model_copy(update={"vocab_size": target.vocab_size}) if is_wider else model
    check_vocabulary(read_as, target, min(draft_vocab_size, target.vocab_size), has_head, id_map)
    anchors = kind == "dspark" and not is_speculators
    if "sample_from_anchor" not in own:
        chose("sample_from_anchor", anchors, "absent: true of dspark heads outside the speculators format, else false")
    values: dict[str, Any] = {
        "kind": kind,
        "model": model,
        "target_hidden_size": target.hidden_size,
        "aux_streams": streams,
        "block_size": own.integer("block_size", minimum=2),
        "mask_token_id": chose("mask token", mask_token_of(config, mask_token_id), "in place of drafts"),
        "draft_vocab_size": draft_vocab_size,
        "is_causal": _is_causal(own, model, is_speculators),
        "sample_from_anchor": own.flag("sample_from_anchor", anchors),
        "value_scale": own.positive("attention_value_scale", 1.0),
        "logit_scale": own.positive("logit_scale", 1.0),
        "has_embed": has_embed,
        "has_head": has_head,
        "has_map": id_map is not None,
        "has_mask_embedding": "mask_embedding" in known,
    }
    if kind == "dspark":
        values["markov"] = _markov_kind(own)
        values["markov_rank"] = own.integer("markov_rank")
        if any(name.startswith("confidence_head.") for name in known):
            chose("confidence head", "left unread", "as many drafts as asked for are verified, whatever it says")
    return DflashConfig(**values)


def _layers(config: Mapping[str, Any], nested: Fields, is_speculators: bool) -> ModelConfig:
    layers = layer_config(config) if is_speculators else dict(config)
    layers |= {"architectures": None, "model_type": "qwen3", "tie_word_embeddings": False}
    layers.setdefault("rope_theta", 1e6)
    if layers.get("is_neox_style") is False:
        raise ConfigError("is_neox_style must be true: heads that turn in pairs are not supported here")
    if nested.raw("use_swa"):
        layers["sliding_window"] = nested.integer("swa_window_size")
        layers["use_sliding_window"] = True
    if layers.get("layer_types") and "sliding_attention" in layers["layer_types"]:
        layers["use_sliding_window"] = True
    if nested.raw("attention_sink_bias"):
        raise ConfigError("dflash_config attention_sink_bias is not supported; take a head without sinks")
    if nested.raw("projector_type", "dflash") not in ("dflash", "dspark"):
        raise ConfigError(
            f"dflash_config projector_type {nested.raw('projector_type')!r} is not supported; take a DFlash or DSpark "
            "head without one"
        )
    return model_config_from_hf(layers, None, ["lm_head.weight"])


def _streams(
    own: Fields, target: ModelConfig, num_layers: int, given: tuple[int, ...] | None, is_speculators: bool
) -> tuple[int, ...]:
    n, L = target.num_layers, num_layers
    if given is not None:
        streams = given
    elif is_speculators and own.raw("aux_hidden_state_layer_ids") is not None:
        streams = tuple(own.raw("aux_hidden_state_layer_ids"))  # these number streams, target_layer_ids layers
    else:
        ids = own.raw("target_layer_ids")
        if ids is None:
            ids = [n // 2] if L == 1 else [round(1 + i * (n - 4) / (L - 1)) for i in range(L)]
        streams = tuple(i + 1 for i in ids)
    chose("streams", streams, "of the target")
    if any(type(i) is not int or not 0 <= i <= n for i in streams):
        raise ConfigError(f"the target's streams {list(streams)} must lie in 0..{n}; correct target_layer_ids")
    return streams


def _is_causal(own: Fields, model: ModelConfig, is_speculators: bool) -> tuple[bool, ...]:
    stated = own.raw("is_causal", own.raw("causal"))
    sliding_is_causal = not own.flag("sliding_window_non_causal", True) if is_speculators else True
    return tuple(
        stated if isinstance(stated, bool) else window is not None and sliding_is_causal
        for window in model.sliding_window_layers
    )


def _markov_kind(own: Fields) -> MarkovKind:
    kinds: tuple[MarkovKind, ...] = get_args(MarkovKind)
    stated = own.text("markov_head_type", "vanilla")
    for kind in kinds:
        if kind == stated:
            return kind
    raise ConfigError(f"markov_head_type must be one of {', '.join(kinds)}, got {stated!r}; take another head")
