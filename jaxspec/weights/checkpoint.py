"""Host. One door to a checkpoint: a folder or a file in, its description and an open reader out."""

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxspec.config.fields import read_json
from jaxspec.config.gguf import ROPE_TENSORS, model_config_from_gguf
from jaxspec.config.hf import model_config_from_hf
from jaxspec.config.model import ModelConfig
from jaxspec.errors import WeightsError
from jaxspec.weights import orbax, safetensors, torch_zip
from jaxspec.weights.fp8 import DEFAULT_BLOCK, Float8Reader, is_float8, weight_block
from jaxspec.weights.gguf import GgufReader
from jaxspec.weights.reader import Reader


@dataclass(frozen=True)
class Checkpoint:
    """path: the file or folder that was opened; source: whose names the tensors have."""

    config: ModelConfig
    reader: Reader
    source: Literal["hf", "gguf"]
    path: Path

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.reader.close()


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a .gguf file, or a folder with config.json and weights (or with exactly one .gguf file).

    Raises:
      ConfigError, WeightsError: nothing usable there, or what is there is corrupt or unsupported.
    """
    path = find_checkpoint(path)
    return _open_gguf(path) if path.is_file() else _open_hf(path)


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """The .gguf file or the folder with a config.json that a path means.

    Raises:
      WeightsError: neither is there.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise WeightsError(f"a checkpoint is a folder or a .gguf file, got {path}; give the folder that holds it")
        return path
    if not path.is_dir():
        raise WeightsError(f"{path} does not exist; give a checkpoint folder or a .gguf file")
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        found = f"{len(files)} .gguf files" if files else "no .gguf file"
        raise WeightsError(f"{path} holds no config.json and {found}; give a model folder or name one .gguf file")
    return files[0]


def describe_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """What a checkpoint says of itself, before it is known what it is for: (config.json or metadata, tensors' shapes).

    Raises:
      ConfigError, WeightsError: nothing readable there.
    """
    path = find_checkpoint(path)
    if path.is_file():
        with GgufReader(path) as gguf:
            return gguf.metadata, {name: info.shape for name, info in gguf.tensors.items()}
    config = read_json(path / "config.json")
    quantization = config.get("quantization_config")
    with open_tensors(path, quantization if isinstance(quantization, dict) else None) as reader:
        return config, {name: info.shape for name, info in reader.tensors.items()}


def open_tensors(folder: str | os.PathLike[str], quantization_config: Mapping[str, Any] | None = None) -> Reader:
    """A reader of whatever weights a folder holds; of several forms Orbax goes before safetensors, and pickles last.

    Args:
      folder: a model's or a drafter's.
      quantization_config: what its config.json says under that name.

    Raises:
      ConfigError, WeightsError: no weights, or they are corrupt or quantised in a way that is not read.
    """
    folder = Path(folder)
    block = weight_block(quantization_config) if quantization_config is not None else DEFAULT_BLOCK
    if (folder / orbax.INDEX_NAME).is_file():
        reader: Reader = orbax.OrbaxReader(folder)
    elif (folder / safetensors.INDEX_NAME).is_file() or any(folder.glob("*.safetensors")):
        reader = safetensors.SafetensorsReader(folder)
    elif (folder / torch_zip.INDEX_NAME).is_file() or torch_zip.torch_files(folder):
        reader = torch_zip.TorchReader(folder)
    else:
        raise WeightsError(
            f"{folder} holds no weights; expected {safetensors.SINGLE_NAME}, {torch_zip.SINGLE_NAME}, either's index "
            f"or {orbax.INDEX_NAME}"
        )
    try:
        return Float8Reader(reader, block) if is_float8(reader) else reader
    except WeightsError:
        reader.close()
        raise


def main_dtype(reader: Reader) -> str:
    """The dtype that most values have: config.json may be silent or wrong about it.

    Quantised values count as bfloat16, which rounds by less than what quantisation has lost already.
    """
    sizes = Counter[str]()
    for info in reader.tensors.values():
        name = "bfloat16" if info.is_quantized else info.dtype.name
        if name in ("float32", "float16", "bfloat16"):
            sizes[name] += math.prod(info.shape)
    return sizes.most_common(1)[0][0] if sizes else "float32"


def _open_gguf(path: Path) -> Checkpoint:
    reader = GgufReader(path)
    try:
        shapes = {name: info.shape for name, info in reader.tensors.items()}
        rope_tensors = {
            name: reader.read(name, np.dtype(np.float32)).reshape(-1).tolist()
            for name in ROPE_TENSORS
            if name in shapes
        }
        config = model_config_from_gguf(reader.metadata, shapes, rope_tensors)
        return Checkpoint(config.model_copy(update={"dtype": main_dtype(reader)}), reader, "gguf", path)
    except Exception:
        reader.close()
        raise


def _open_hf(path: Path) -> Checkpoint:
    config = read_json(path / "config.json")
    generation = path / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else None
    quantization = config.get("quantization_config")
    reader = open_tensors(path, quantization if isinstance(quantization, dict) else None)
    try:
        if isinstance(reader, Float8Reader):  # its scales are applied as it is read
            config = {key: value for key, value in config.items() if key != "quantization_config"}
        model = model_config_from_hf(config, generation_config, reader.tensors)
        return Checkpoint(model.model_copy(update={"dtype": main_dtype(reader)}), reader, "hf", path)
    except Exception:
        reader.close()
        raise
