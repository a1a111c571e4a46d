"""Host. What a config's models are, from their descriptions alone: no weight need be on this machine.

A name is a folder or a file, or else NAME.json in one of a few folders: the config.json that its repository publishes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.config.detect import DraftTokens, detect, draft_tokens_of, mask_token_of, settle_method
from jaxspec.config.engine import EngineConfig
from jaxspec.config.fields import Fields, read_json
from jaxspec.config.heads import HeadConfig
from jaxspec.config.hf import model_config_from_hf
from jaxspec.config.hf_heads import head_config
from jaxspec.config.methods import METHODS, drafter_of
from jaxspec.config.model import ModelConfig
from jaxspec.config.speculative import SpeculativeConfig
from jaxspec.config.support import check_built
from jaxspec.engine.heads import METHODS_WITH_HEADS
from jaxspec.errors import ConfigError, WeightsError
from jaxspec.weights.aliases import ALIASES, resolve_model
from jaxspec.weights.checkpoint import open_checkpoint, open_tensors

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Described:
    """The models of a config. drafter: a whole draft model, or a head; None for what needs no weights of its own.

    assumed: what stands in for tensors that are not there, a sentence each.
    """

    target: ModelConfig
    method: str | None = None
    drafter: ModelConfig | HeadConfig | None = None
    draft_tokens: DraftTokens | None = None
    mask_token_id: int | None = None
    assumed: tuple[str, ...] = ()


def describe(config: EngineConfig, folders: Sequence[Path]) -> Described:
    """Args:
        config: as the engine would be given it.
        folders: where descriptions lie, by the model's name.

    Raises:
        ConfigError, WeightsError: no description, or one that cannot be run as the config says.
    """
    values, shapes, target = _target(config.model, folders)
    assumed = [] if shapes else [f"{config.model}: the tensors that its config.json speaks of"]
    speculative = config.speculative_config
    if speculative is None:
        return Described(target, assumed=tuple(assumed))
    method = speculative.method
    if method is not None and drafter_of(method) == "mtp":
        if not shapes:
            shapes = _mtp_tensors(target)
            assumed.append("its multi-token-prediction module shares the target's embedding and head")
        head = head_config("mtp", {}, shapes, target)
        return Described(target, method, head, draft_tokens_of("mtp", values, shapes), assumed=tuple(assumed))
    if method is not None and METHODS[method].needs not in ("model", "head"):
        return Described(target, method, assumed=tuple(assumed))
    assert speculative.model is not None  # the config saw to it
    return _with_draft(speculative, speculative.model, target, folders, assumed)


def _with_draft(
    speculative: SpeculativeConfig, name: str, target: ModelConfig, folders: Sequence[Path], assumed: list[str]
) -> Described:
    path = _find(name, folders)
    if path.suffix == ".gguf":
        with open_checkpoint(path) as checkpoint:
            return Described(target, speculative.method or "draft_model", checkpoint.config, assumed=tuple(assumed))
    values, shapes = _read(path)
    if not shapes:
        shapes = _drafter_tensors(speculative.method, values, target, name)
        assumed.append(f"{name}: the tensors that published files of its kind hold")
    method = settle_method(
        speculative.method, name, detect(values, shapes), is_parallel=speculative.parallel_drafting
    )  # fmt: skip
    check_built(method)
    drafter, mask = drafter_of(method), speculative.mask_token_id
    told = draft_tokens_of(drafter, values, shapes)
    if drafter not in METHODS_WITH_HEADS:
        mask = mask_token_of(values, mask) if drafter == "pard" else None
        return Described(target, method, _model(values, shapes), told, mask, tuple(assumed))
    streams = speculative.eagle_aux_hidden_state_layer_ids
    head = head_config(
        drafter,
        values,
        shapes,
        target,
        aux_layer_ids=None if streams is None else tuple(streams),
        mask_token_id=mask,
    )
    return Described(target, method, head, told, assumed=tuple(assumed))


def _target(name: str, folders: Sequence[Path]) -> tuple[dict[str, Any], Shapes, ModelConfig]:
    path = _find(name, folders)
    if path.suffix == ".gguf" or any(path.glob("*.gguf")):
        with open_checkpoint(path) as checkpoint:
            shapes = {key: info.shape for key, info in checkpoint.reader.tensors.items()}
            return {}, shapes, checkpoint.config
    values, shapes = _read(path)
    return values, shapes, _model(values, shapes)


def _find(name: str, folders: Sequence[Path]) -> Path:
    if Path(name).expanduser().exists() or name.lower() in ALIASES:
        return resolve_model(name)
    for folder in folders:
        if (path := folder / f"{name}.json").is_file():
            return path
    places = ", ".join(map(str, folders)) or "no folder at all"
    raise ConfigError(
        f"model {name!r} is not on this machine, and {places} holds no {name}.json; put the repository's config.json "
        "there under that name, or give a folder with --models"
    )


def _read(path: Path) -> tuple[dict[str, Any], Shapes]:
    """A description, and the shapes of the tensors beside it; none where there are no weights."""
    if path.is_file():
        return read_json(path), {}
    values = read_json(path / "config.json")
    quantization = values.get("quantization_config")
    try:
        reader = open_tensors(path, quantization if isinstance(quantization, dict) else None)
    except WeightsError as error:
        if "holds no weights" not in str(error):
            raise
        return values, {}
    with reader:
        return values, {name: info.shape for name, info in reader.tensors.items()}


def _model(values: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
    """A whole model; without tensors it has a head unless its config ties it. Float8 files are read as bfloat16."""
    quantization = values.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "fp8":
        values = {key: value for key, value in values.items() if key != "quantization_config"}
    return model_config_from_hf(values, None, list(shapes) or ["lm_head.weight"])


def _mtp_tensors(target: ModelConfig) -> Shapes:
    """By which a module of DeepSeek's kind is known."""
    if target.model_type not in ("deepseek_v3", "glm4_moe"):
        raise ConfigError(
            f"the multi-token-prediction module of a {target.model_type} model is known by its tensors alone; "
            "give the folder that holds its weights"
        )
    first, width, count = target.num_layers, target.hidden_size, max(target.num_mtp_layers, 1)
    names = {f"model.layers.{first + i}.eh_proj.weight": (width, 2 * width) for i in range(count)}
    if target.moe is not None:
        expert = (target.moe.intermediate_size, width)
        names |= {f"model.layers.{first + i}.mlp.experts.0.up_proj.weight": expert for i in range(count)}
    return names


def _drafter_tensors(method: str | None, values: Mapping[str, Any], target: ModelConfig, name: str) -> Shapes:
    """Of the kinds that are published with always the same tensors."""
    drafter = None if method is None else drafter_of(method)
    if drafter in (None, "model", "draft_model", "pard"):
        return {}
    fields = Fields(values, f"the config.json of {name}")
    if drafter not in ("eagle", "eagle3"):
        raise ConfigError(
            f"a drafter of method {drafter!r} is known by its tensors alone; give the folder that holds {name}'s "
            "weights"
        )
    width = fields.integer("hidden_size")
    if drafter == "eagle":
        return {"fc.weight": (width, 2 * width)}
    vocabulary = fields.integer("vocab_size")
    own = fields.integer("draft_vocab_size", vocabulary)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, 3 * target.hidden_size),
        "lm_head.weight": (own, width),
        "midlayer.hidden_norm.weight": (width,),
    }
    if own < vocabulary:
        shapes["d2t"] = (own,)
    if width != target.hidden_size:
        shapes["embed_tokens.weight"] = (vocabulary, width)
    return shapes
