"""Host. What kind of drafter a checkpoint holds, told by its config and its tensors' shapes, never by its name."""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jaxspec.config.methods import LOOKUP_FIRST, METHODS, PARALLEL, drafter_of
from jaxspec.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]

_BY_MODEL_TYPE = {"medusa": "medusa", "mlp_speculator": "mlp_speculator", "eagle": "eagle"}
_BY_ARCHITECTURE = (
    ("DFlash2", "dflash2"),
    ("DFlash", "dflash"),
    ("Qwen3DSpark", "dspark"),
    ("PEagle", "p_eagle"),
    ("Peagle", "p_eagle"),
    ("LlamaForCausalLMEagle3", "eagle3"),
    ("Eagle3", "eagle3"),
    ("LlamaForCausalLMEagle", "eagle"),
    ("MLPSpeculator", "mlp_speculator"),
    ("MedusaModel", "medusa"),
)
_MEDUSA = re.compile(r"(medusa_heads?\.)?(\d+)\.\d+\.(linear\.)?(weight|bias)")
_MEDUSA_BLOCK = re.compile(r"(medusa_heads\.)?blocks\.(\d+)\.layers\.\d+\.(weight|bias)")
# Multi-token-prediction modules inside a target: how their tensors are named, past the target's own layers.
_MTP = re.compile(
    r"(model\.(language_model\.)?)?(mtp(_layers|_block|_linear_proj)?\.|layers\.\d+\.(eh_proj|enorm)\.).*"
    r"|blk\.\d+\.nextn\..*"
)
_PARD_TOKENS = ("pard_token", "ptd_token_id")
_MASK_TOKENS = ("mask_token_id", "dspark_noise_token_id", *_PARD_TOKENS)
_NUM_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


class Drafter(NamedTuple):
    """The method that drafts with a checkpoint, and the field or tensor that says so."""

    method: str
    because: str


class DraftTokens(NamedTuple):
    """How many drafts a row the draft's files speak of: only a default, a number whose multiples also work, or most."""

    num_tokens: int
    rule: Literal["default", "multiple", "most"]


def detect(config: Mapping[str, Any], shapes: Shapes) -> Drafter | None:
    """What drafter a checkpoint is, or None where it is a whole model.

    The config's own word goes first; published EAGLE files say nothing there and are known by their tensors.

    Args:
        config: its config.json, or a GGUF file's metadata.
    """
    if isinstance(stated := config.get("speculators_model_type"), str):
        return Drafter({"peagle": "p_eagle"}.get(stated, stated), f"speculators_model_type {stated!r}")
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if isinstance(model_type, str) and model_type in _BY_MODEL_TYPE:
        return Drafter(_BY_MODEL_TYPE[model_type], f"model_type {model_type!r}")
    if isinstance(model_type, str) and model_type.endswith("_mtp"):
        return Drafter("mtp", f"model_type {model_type!r}")
    if "medusa_num_heads" in config:
        return Drafter("medusa", "medusa_num_heads in its config")
    for name in architectures if isinstance(architectures, list) else []:
        for start, method in _BY_ARCHITECTURE:
            if isinstance(name, str) and name.startswith(start):
                # Parallel EAGLE-3 heads have the plain ones' architecture and a state of their own for masks; some
                # DSpark heads that of DFlash.
                special = _by_mask(shapes) or (_by_markov(shapes) if method == "dflash" else None)
                return special or Drafter(method, f"architecture {name!r}")
    if config.get("general.architecture") == "eagle3":
        return Drafter("eagle3", "general.architecture 'eagle3'")
    if any(type(config.get(key)) is int for key in _PARD_TOKENS) and "mask_hidden" not in shapes:
        key = next(key for key in _PARD_TOKENS if type(config.get(key)) is int)
        if _by_tensors(config, shapes) is None:
            return Drafter("pard", f"{key} in its config")
    return _by_tensors(config, shapes)


def has_mtp_modules(shapes: Shapes) -> bool:
    """Whether a target's checkpoint holds multi-token-prediction modules beside the model."""
    return any(_MTP.fullmatch(name) for name in shapes)


def _bare(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {name.removeprefix("model."): tuple(shape) for name, shape in shapes.items()}


def _by_mask(shapes: Shapes) -> Drafter | None:
    return Drafter("p_eagle", "tensor 'mask_hidden'") if "mask_hidden" in _bare(shapes) else None


def _by_markov(shapes: Shapes) -> Drafter | None:
    name = next((name for name in _bare(shapes) if name.startswith("markov_head.")), None)
    return None if name is None else Drafter("dspark", f"tensor {name!r}")


def _by_tensors(config: Mapping[str, Any], shapes: Shapes) -> Drafter | None:
    names = _bare(shapes)
    if (masked := _by_mask(shapes)) is not None:
        return masked
    if (walking := _by_markov(shapes)) is not None:
        return walking
    if "hidden_norm.weight" in names and "layers.0.self_attn.q_norm.weight" in names:
        return Drafter("dflash", "tensors 'hidden_norm.weight' and 'layers.0.self_attn.q_norm.weight'")
    for name in names:  # the others may have a vocabulary of their own as well
        if name == "d2t" or name.startswith("midlayer."):
            return Drafter("eagle3", f"tensor {name!r}")
    fc = names.get("fc.weight", ())
    if len(fc) == 2:
        is_first = fc[1] == 2 * fc[0] and "layers.0.input_layernorm.weight" not in names
        return Drafter("eagle" if is_first else "eagle3", f"tensor 'fc.weight' of shape {fc}")
    query, hidden = names.get("layers.0.self_attn.q_proj.weight", ()), config.get("hidden_size")
    if len(query) == 2 and type(hidden) is int and query[1] == 2 * hidden:
        return Drafter("eagle3", f"'layers.0.self_attn.q_proj.weight' of shape {query} over hidden_size {hidden}")
    if "speculator.emb.0.weight" in names:
        return Drafter("mlp_speculator", "tensor 'speculator.emb.0.weight'")
    if names and all(_MEDUSA.fullmatch(name) for name in names):
        return Drafter("medusa", f"tensors named like {next(iter(names))!r}")
    return None


def settle_method(asked: str | None, model: str, drafter: Drafter | None, *, is_parallel: bool = False) -> str:
    """The method to draft with a checkpoint by: what its files tell, which must be what was asked for, if anything was.

    Args:
        asked: a method of METHODS that takes a model, or None.
        model: the draft as the user named it, for errors.
        drafter: what `detect` found.

    Raises: ConfigError naming both sides where they differ.
    """
    if asked is not None and asked.startswith(LOOKUP_FIRST):
        named = None if asked == f"{LOOKUP_FIRST}model" else drafter_of(asked)
        return LOOKUP_FIRST + settle_method(named, model, drafter, is_parallel=is_parallel)
    told = drafter.method if drafter is not None else "draft_model"
    holds = "a whole model" if drafter is None else f"a {told} drafter ({drafter.because})"
    if told not in METHODS:
        raise ConfigError(f"{model!r} holds {holds}, which none of the methods takes: {', '.join(METHODS)}")
    fits = {told} | ({"pard"} if told in ("draft_model", "pard") else set())
    if told == "pard":
        fits.add("draft_model")  # any parallel model is also a plain one
    if is_parallel and told in PARALLEL:
        fits.add(PARALLEL[told])
        told = PARALLEL[told]
    if asked is None:
        return told
    if asked not in fits:
        raise ConfigError(
            f"speculative method {asked!r} was asked for, but {model!r} holds {holds}; "
            f"drop 'method' or say {told!r}, or give a model of that kind"
        )
    return asked


def check_mtp(shapes: Shapes, model: str) -> None:
    """Raises: ConfigError where a target's checkpoint has no modules for method "mtp", naming what it has instead."""
    if has_mtp_modules(shapes):
        return
    if any(name.removeprefix("model.").startswith("markov_head.") for name in shapes):
        raise ConfigError(
            f"method 'mtp' was asked for, but {model!r} holds dspark's heads and no MTP modules; say method 'dspark'"
        )
    raise ConfigError(
        f"method 'mtp' was asked for, but {model!r} holds no MTP modules (copies often leave them out); "
        "take the original checkpoint or another method"
    )


def draft_tokens_of(method: str, config: Mapping[str, Any], shapes: Shapes) -> DraftTokens | None:
    """How many drafts a row a drafter's files speak of, or None where they do not.

    Args:
        config, shapes: the draft's, or for "mtp" the target's.
    """
    if method == "medusa":  # the published config says 2 of a file with 5
        found = [_MEDUSA.fullmatch(name) or _MEDUSA_BLOCK.fullmatch(name) for name in shapes]
        heads = {match[2] for match in found if match is not None}
        return DraftTokens(len(heads), "most") if heads else None
    if method in ("dflash", "dspark"):
        nested = config.get("dflash_config")
        own = {**config, **nested} if isinstance(nested, Mapping) else config
        block = _whole(own, "block_size")
        if block is not None and block > 1:
            # The block's first position is the token that is known already; raw dspark files predict from it too.
            anchored = own.get("sample_from_anchor", method == "dspark" and "speculators_model_type" not in config)
            return DraftTokens(block if anchored else block - 1, "most")
    if method == "mtp":
        for key in (*_NUM_MTP, "n_predict"):
            if (count := _whole(config, key)) is not None:
                return DraftTokens(count, "multiple")
    if (count := _whole(config, "n_predict")) is not None:
        return DraftTokens(count, "multiple")
    stated = config.get("speculators_config")
    proposals = stated.get("proposal_methods") if isinstance(stated, Mapping) else None
    for proposal in proposals if isinstance(proposals, list) else []:
        if isinstance(proposal, Mapping) and (count := _whole(proposal, "speculative_tokens")) is not None:
            return DraftTokens(count, "default")
    return None


def mask_token_of(config: Mapping[str, Any], stated: int | None = None) -> int:
    """The token that stands for a place to fill, of a drafter that fills them in one pass.

    Args:
        config: the draft's config.json.
        stated: by the user, who is believed before the config.

    Raises: ConfigError where neither names one.
    """
    if stated is not None:
        return stated
    nested = config.get("dflash_config")
    places = [("dflash_config.mask_token_id", nested.get("mask_token_id"))] if isinstance(nested, Mapping) else []
    for key, value in [*places, *((key, config.get(key)) for key in _MASK_TOKENS)]:
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < 2**31:
            raise ConfigError(f"{key} must be a token id, got {value!r:.100}; correct the draft's config.json")
        return value
    raise ConfigError(
        f"parallel drafting needs the draft's mask token, and its config.json has none of dflash_config.mask_token_id, "
        f"{', '.join(_MASK_TOKENS)}; set mask_token_id in speculative_config, or take a draft trained for it"
    )


def _whole(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int and value > 0 else None


def settle_num_tokens(asked: int | None, told: DraftTokens | None) -> int:
    """The drafts a row: as asked for, or as the draft's files say.

    Raises: ConfigError where neither says, or the files cannot give what is asked for.
    """
    if asked is None:
        if told is None:
            raise ConfigError(
                "num_speculative_tokens must be provided, the drafts a row in a round: neither the config nor the "
                "draft's files say it; 4 is a good start"
            )
        return told.num_tokens
    if told is not None and asked > told.num_tokens:
        if told.rule == "most":
            raise ConfigError(
                f"num_speculative_tokens={asked} exceeds the {told.num_tokens} that this drafter gives in its one "
                "pass; lower it"
            )
        if told.rule == "multiple" and asked % told.num_tokens:
            raise ConfigError(
                f"num_speculative_tokens={asked} must be divisible by n_predict={told.num_tokens} of the draft; "
                f"give a multiple, or less than {told.num_tokens}"
            )
    return asked


# Drafters whose layers can be split over devices as a target's; the others are small.
SPLIT_DRAFTERS = ("draft_model", "pard", "eagle", "eagle3", "p_eagle")


def settle_draft_tensor_parallel(asked: int | None, target: int, method: str) -> int:
    """Devices a draft is split over: as many as the target by default, one for what cannot be split.

    Raises: ConfigError for anything but 1 and the target's, and for that where the draft cannot be split.
    """
    can_split = method in SPLIT_DRAFTERS
    if asked is None:
        return target if can_split else 1
    if asked not in (1, target):
        raise ConfigError(
            f"draft_tensor_parallel_size={asked} must be 1 or the target's tensor_parallel_size={target}; take either"
        )
    if asked > 1 and not can_split:
        raise ConfigError(
            f"draft_tensor_parallel_size={asked} is not supported for method {method!r}, whose drafter every device "
            "has whole; take 1"
        )
    return asked


def settle_draft_max_model_len(asked: int | None, draft: int, target: int) -> int:
    """Positions a draft may use: the smaller limit of the two models by default.

    Raises: ConfigError for more than either has.
    """
    if asked is not None and asked > min(draft, target):
        raise ConfigError(
            f"speculative_config max_model_len={asked} must not exceed the draft's {draft} nor the target's {target}; "
            "lower it"
        )
    return min(draft, target) if asked is None else asked
