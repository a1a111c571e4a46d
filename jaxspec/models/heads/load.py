"""Host. Opens a draft head for its target: what it is, its weights, and what of the target it shares."""

import logging
from collections.abc import Collection
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.fields import read_json
from jaxspec.config.heads import DflashConfig, EagleConfig, HeadConfig, MedusaConfig, MlpSpeculatorConfig, MtpConfig
from jaxspec.config.hf_heads import head_config
from jaxspec.config.model import ModelConfig
from jaxspec.errors import WeightsError
from jaxspec.models.base import Weights
from jaxspec.models.heads import dflash, eagle, medusa, mlp_speculator, mtp
from jaxspec.weights.checkpoint import Checkpoint, open_tensors
from jaxspec.weights.load import Put, check, load
from jaxspec.weights.names import NameTable
from jaxspec.weights.reader import Reader
from jaxspec.weights.torch_zip import read_torch_value

logger = logging.getLogger(__name__)

_MASK_FILE = "mask_embedding.pt"
_MODULES: dict[type, ModuleType] = {
    EagleConfig: eagle,
    MtpConfig: mtp,
    MedusaConfig: medusa,
    MlpSpeculatorConfig: mlp_speculator,
    DflashConfig: dflash,
}


def specs_of(config: HeadConfig, dtype: Any) -> Any:
    """The tree of ArraySpecs of a head's files."""
    return _MODULES[type(config)].specs(config, dtype)


def _name_table(config: HeadConfig, tensor_names: Collection[str]) -> NameTable:
    return _MODULES[type(config)].name_table(config, tensor_names)


@dataclass(frozen=True)
class HeadCheckpoint:
    """An open drafter: what it is, its tensors, and the vector that lies beside them in a file of its own, if any."""

    config: HeadConfig
    reader: Reader
    mask_embedding: np.ndarray | None = None


@contextmanager
def open_head(
    kind: str,
    folder: Path | None,
    target: Checkpoint,
    *,
    aux_layer_ids: tuple[int, ...] | None = None,
    mask_token_id: int | None = None,
):
    """Yields the HeadCheckpoint of a drafter's folder, or, without one, of the module in the target's own checkpoint.

    Raises:
      ConfigError, WeightsError: nothing usable there, or nothing that can draft for this target.
    """
    if folder is None:
        shapes = {name: info.shape for name, info in target.reader.tensors.items()}
        yield HeadCheckpoint(head_config(kind, {}, shapes, target.config, aux_layer_ids=aux_layer_ids), target.reader)
        return
    if not folder.is_dir():
        raise WeightsError(f"a draft head is a folder with config.json and weights, got {folder}; give that folder")
    values = read_json(folder / "config.json")
    quantization = values.get("quantization_config")
    reader = open_tensors(folder, quantization if isinstance(quantization, dict) else None)
    try:
        shapes = {name: info.shape for name, info in reader.tensors.items()}
        config = head_config(
            kind, values, shapes, target.config, aux_layer_ids=aux_layer_ids, mask_token_id=mask_token_id
        )
        yield HeadCheckpoint(config, reader, _mask_embedding(folder, config))
    finally:
        reader.close()


def _mask_embedding(folder: Path, config: HeadConfig) -> np.ndarray | None:
    """What stands for a mask token in place of the embedding's row: the target's is often zero, never trained.

    Raises:
      WeightsError: a file that holds none, or one for another token.
    """
    path = folder / _MASK_FILE
    if not isinstance(config, DflashConfig) or not path.is_file():
        return None
    value = read_torch_value(path)
    if isinstance(value, dict):
        token_id = value.get("mask_token_id", config.mask_token_id)
        if token_id != config.mask_token_id:
            raise WeightsError(
                f"{path} is of token {token_id}, the config's mask_token_id is {config.mask_token_id}; fetch both again"
            )
        value = value.get("embedding", value.get("mask_embedding"))
    size = config.model.hidden_size
    if not isinstance(value, np.ndarray) or value.size != size or not jnp.issubdtype(value.dtype, jnp.floating):
        shape = list(value.shape) if isinstance(value, np.ndarray) else type(value).__name__
        raise WeightsError(f"{path} must hold one vector of {size} numbers, as 'embedding' or alone, got {shape}")
    logger.info("draft head: mask token %d: embedding from %s", config.mask_token_id, _MASK_FILE)
    return value.reshape(size)


def unread_tensors(head: HeadCheckpoint) -> list[str]:
    """What of a drafter's files would stay unread; nothing is loaded.

    Raises:
      WeightsError: tensors are missing, left over or misshaped.
    """
    return check(head.reader, specs_of(head.config, jnp.float32), _name_table(head.config, head.reader.tensors))


def load_head(
    head: HeadCheckpoint, target: ModelConfig, target_weights: Weights, dtype: Any, *, put: Put | None = None
) -> Weights:
    """The head's weights as its functions take them: with the target's embedding where it has none or the same, and
    with draft ids mapped to the target's. put: as `load` takes it.

    Raises:
      WeightsError: tensors are missing, left over or misshaped, or an id map is none.
    """
    config, reader = head.config, head.reader
    weights = load(reader, specs_of(config, dtype), _name_table(config, reader.tensors), put=put)
    if not isinstance(config, MedusaConfig | MlpSpeculatorConfig):
        for module in weights.get("modules", [weights]):
            _share(module, head, target, target_weights, dtype)
    if "id_map" in weights:
        t2d = next((name for name in reader.tensors if name.removeprefix("model.") == "t2d"), None)
        is_absolute = (
            True if "token_map" in (getattr(config, "id_map", None),) or isinstance(config, MedusaConfig) else None
        )
        ids = target_ids(
            np.asarray(weights.pop("id_map")),
            None if t2d is None else reader.read(t2d),
            target.vocab_size,
            is_absolute=is_absolute,
        )
        weights["target_ids"] = jnp.asarray(ids)
    return weights


def _share(weights: Weights, head: HeadCheckpoint, target: ModelConfig, target_weights: Weights, dtype: Any) -> None:
    """Puts the target's embedding and head where the files have none, or the same."""
    config = head.config
    table = target_weights["embed"]
    if "embed" not in weights:
        logger.info("draft head: embedding: the target's (none stored)")
        weights["embed"] = table
    elif _is_same(weights["embed"], table, target.vocab_size):
        logger.info("draft head: embedding: the target's (the stored one is equal)")
        weights["embed"] = table
    else:
        logger.info("draft head: embedding: its own (it differs from the target's)")
    if isinstance(config, EagleConfig) and config.is_head_tied:
        logger.info("draft head: vocabulary head: tied to the embedding")
        weights["head"] = weights["embed"]
    if head.mask_embedding is not None:
        weights["mask_embedding"] = jnp.asarray(head.mask_embedding, dtype)
    mask_token_id, num_rows = getattr(config, "mask_token_id", None), weights["embed"].shape[0]
    if mask_token_id is not None and mask_token_id >= num_rows and "mask_embedding" not in weights:
        raise WeightsError(
            f"{mask_token_id=} has no row in an embedding of {num_rows}, and no {_MASK_FILE} lies beside the "
            "draft head; fetch it again"
        )
    if isinstance(config, DflashConfig) and config.draft_vocab_size > target.vocab_size:
        logger.info("draft head: its tokens beyond the target's %d are never drafted", target.vocab_size)
        if "head" in weights:
            weights["head"] = weights["head"][: target.vocab_size]
        if "markov" in weights:
            weights["markov"]["to_token"] = weights["markov"]["to_token"][: target.vocab_size]
    stored = target_weights.get("head")
    if isinstance(stored, jax.Array) and isinstance(weights.get("head"), jax.Array):
        if _is_same(weights["head"], stored, target.vocab_size):
            logger.info("draft head: vocabulary head: the target's (the stored one is equal)")
            weights["head"] = stored
    elif "head" not in weights:
        logger.info("draft head: vocabulary head: the target's (none stored)")


def _is_same(own: jax.Array, stored: jax.Array, num_rows: int) -> bool:
    """Whether the rows are the target's; what is split over devices may be filled up behind them."""
    if own.shape != stored.shape:
        if own.shape[1:] != stored.shape[1:] or len(own) != num_rows or len(stored) < num_rows:
            return False
        stored = stored[:num_rows]
    return bool(jnp.all(own == stored))


def target_ids(
    id_map: np.ndarray, t2d: np.ndarray | None, vocab_size: int, *, is_absolute: bool | None = None
) -> np.ndarray:
    """i32[draft_V]: the target's id of each draft id, from a map of offsets (the published form) or of the ids
    themselves.

    Args:
      id_map: one entry a draft id.
      t2d: which target ids the draft vocabulary holds, where the file says so; it decides between the two forms.
      vocab_size: the target's.
      is_absolute: which form it is, where the format leaves no doubt.

    Raises:
      WeightsError: neither form gives distinct ids of the target.
    """
    draft = np.arange(len(id_map), dtype=np.int64)

    def is_good(ids: np.ndarray) -> bool:
        in_range = bool(((ids >= 0) & (ids < vocab_size)).all())
        if not in_range or len(np.unique(ids)) != len(ids):
            return False
        if t2d is None or t2d.dtype != np.bool_:
            return True
        return len(t2d) == vocab_size and int(t2d.sum()) == len(ids) and bool(t2d[ids].all())

    forms = {"offsets": draft + id_map, "the target's ids themselves": id_map.astype(np.int64)}
    wanted = [name for name in forms if is_absolute is None or (name != "offsets") == is_absolute]
    for name in wanted:
        if is_good(forms[name]):
            logger.info("draft head: the map of %d draft ids holds %s", len(id_map), name)
            return forms[name].astype(np.int32)
    raise WeightsError(
        f"the map of {len(id_map)} draft ids gives no distinct ids of the target's {vocab_size}"
        f"{', or not those that t2d marks' if t2d is not None else ''}, neither as offsets nor as ids; "
        "fetch the draft head again, or the one trained for this target"
    )
