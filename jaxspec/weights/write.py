"""Host. Writes a checkpoint's tensors as shards of safetensors or Orbax, in an order that never holds more than one."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.weights import orbax, safetensors
from jaxspec.weights.reader import Reader, TensorInfo

_DTYPE_NAMES = {np.dtype(dtype): name for name, dtype in safetensors.DTYPES.items()}


def planned_dtypes(reader: Reader, dtype: str) -> dict[str, np.dtype]:
    """What each tensor is written as: "auto" keeps it, and takes bfloat16 for what was quantised.

    Another dtype is for floats; ids, maps and masks stay what they are.
    """
    return {name: _planned(info, dtype) for name, info in reader.tensors.items()}


def write_shards(
    reader: Reader, folder: Path, form: str, dtypes: Mapping[str, np.dtype], max_shard_bytes: int
) -> list[str]:
    """Writes every tensor of `reader` into a folder, and the index that belongs to the form.

    Args:
      reader: gives the tensors, one at a time.
      folder: an existing folder.
      form: "safetensors" (memory: one tensor) or "orbax" (memory: one shard).
      dtypes: what each is cast to.
      max_shard_bytes: a shard holds no more, unless one tensor alone does.

    Returns:
      The names of the shards.
    """
    shards = _split(reader, dtypes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards, 1):
        shard = _shard_name(form, index, len(shards))
        if form == "orbax":
            orbax.write_orbax_shard(folder / shard, {name: reader.read(name, dtypes[name]) for name in names})
        else:
            _write_safetensors(folder / shard, reader, {name: dtypes[name] for name in names})
        for name in names:
            reader.release(name)
        weight_map |= dict.fromkeys(names, shard)
    if form == "orbax":
        orbax.write_index(folder, weight_map)
    elif len(shards) > 1:
        total = sum(_num_bytes(reader.tensors[name], dtype) for name, dtype in dtypes.items())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        (folder / safetensors.INDEX_NAME).write_text(text, encoding="utf-8")
    return list(dict.fromkeys(weight_map.values()))


def _planned(info: TensorInfo, dtype: str) -> np.dtype:
    if info.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
        return info.dtype
    if dtype != "auto":
        return np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    return np.dtype(ml_dtypes.bfloat16) if info.is_quantized else info.dtype


def _num_bytes(info: TensorInfo, dtype: np.dtype) -> int:
    return math.prod(info.shape) * dtype.itemsize


def _split(reader: Reader, dtypes: Mapping[str, np.dtype], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, info in reader.tensors.items():
        size = _num_bytes(info, dtypes[name])
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _shard_name(form: str, index: int, count: int) -> str:
    if form == "orbax":
        return f"orbax-{index:05}-of-{count:05}"
    return safetensors.SINGLE_NAME if count == 1 else f"model-{index:05}-of-{count:05}.safetensors"


def _write_safetensors(path: Path, reader: Reader, dtypes: Mapping[str, np.dtype]) -> None:
    """The safetensors package would take all tensors at once, and copy them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype in dtypes.items():
        begin, end = end, end + _num_bytes(reader.tensors[name], dtype)
        shape = list(reader.tensors[name].shape)
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that values lie aligned in the file
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, dtype in dtypes.items():
            array = np.ascontiguousarray(reader.read(name, dtype))
            file.write(array.reshape(-1).view(np.uint8).data)
            reader.release(name)
