"""Host. One door to a checkpoint: a folder or a file in, its description and an open reader out."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from jaxspec.config.fields import read_json
from jaxspec.config.gguf import ROPE_DIVISORS_NAME, model_config_from_gguf
from jaxspec.config.hf import model_config_from_hf
from jaxspec.config.model import ModelConfig
from jaxspec.errors import WeightsError
from jaxspec.weights.gguf import GgufReader
from jaxspec.weights.reader import Reader
from jaxspec.weights.safetensors import SafetensorsReader


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
    """Opens a .gguf file, or a folder with config.json and safetensors (or with exactly one .gguf file).

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


def _open_gguf(path: Path) -> Checkpoint:
    reader = GgufReader(path)
    try:
        shapes = {name: info.shape for name, info in reader.tensors.items()}
        divisors = reader.read(ROPE_DIVISORS_NAME, np.dtype(np.float32)) if ROPE_DIVISORS_NAME in shapes else None
        config = model_config_from_gguf(
            reader.metadata, shapes, None if divisors is None else divisors.reshape(-1).tolist()
        )
        # bfloat16 rounds by less than what quantisation has lost already.
        dtype = "bfloat16" if reader.is_quantized else _main_dtype(reader)
        return Checkpoint(config.model_copy(update={"dtype": dtype}), reader, "gguf", path)
    except Exception:
        reader.close()
        raise


def _open_hf(path: Path) -> Checkpoint:
    config = read_json(path / "config.json")
    generation = path / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else None
    reader = SafetensorsReader(path)
    try:
        model = model_config_from_hf(config, generation_config, reader.tensors)
        return Checkpoint(model.model_copy(update={"dtype": _main_dtype(reader)}), reader, "hf", path)
    except Exception:
        reader.close()
        raise


def _main_dtype(reader: Reader) -> str:
    """The dtype that most values have: config.json may be silent or wrong about it."""
    sizes = Counter[str]()
    for info in reader.tensors.values():
        if info.dtype.name in ("float32", "float16", "bfloat16"):
            sizes[info.dtype.name] += int(np.prod(info.shape))
    return sizes.most_common(1)[0][0] if sizes else "float32"
