"""Host. Reads safetensors checkpoints, single or sharded, as views of the mapped files.

The header is parsed here and not by the safetensors package: its numpy front end cannot give float8, and gives
bfloat16 only after a side effect of importing ml_dtypes.
"""

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.errors import WeightsError
from jaxspec.weights.mapped import MappedFile, MappedReader
from jaxspec.weights.reader import TensorInfo, is_shape
from jaxspec.weights.shards import check_index, corrupt, indexed_files, join_tables, unique_pairs

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


class SafetensorsReader(MappedReader):
    """A Reader over a folder (index and shards, or one file) or over one .safetensors file."""

    def __init__(self, path: str | os.PathLike[str]):
        """Reads every header and checks it against its file and the index.

        Raises:
          WeightsError: a missing shard, a corrupt or truncated file, or an index that contradicts the files.
        """
        path = Path(path)
        files, weight_map = _find_files(path)
        table = join_tables(files, read_safetensors_header, path)
        if weight_map is not None:
            check_index(path / INDEX_NAME, weight_map, {name: file for name, (file, _) in table.items()})
        self._spans = {name: (file, start, stop) for name, (file, (_, start, stop)) in table.items()}
        super().__init__(path, {name: info for name, (_, (info, _, _)) in table.items()}, files)

    def _span(self, name: str) -> tuple[Path, int, int]:
        return self._spans[name]

    def _view(self, files: Mapping[Path, MappedFile], name: str) -> np.ndarray:
        info, (file, start, stop) = self.tensors[name], self._spans[name]
        return files[file].view(start, stop).view(info.dtype).reshape(info.shape)


def read_safetensors_header(path: Path) -> dict[str, tuple[TensorInfo, int, int]]:
    """{tensor name: (info, first byte, past the last byte)} of one file, every number checked against its size.

    Raises:
      WeightsError: unreadable, truncated or corrupt file.
    """
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            head = file.read(8)
            header_bytes = struct.unpack("<Q", head)[0] if len(head) == 8 else file_bytes
            if header_bytes > min(file_bytes - 8, MAX_HEADER_BYTES):
                raise corrupt(path, f"its header claims {header_bytes} bytes of a file of {file_bytes}")
            raw = file.read(header_bytes)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        header = json.loads(raw.decode(), object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise corrupt(path, f"its header is not valid JSON ({str(error)[:200]})") from error
    if not isinstance(header, dict):
        raise corrupt(path, "its header is not a JSON object")
    header.pop("__metadata__", None)

    base, data_bytes = 8 + header_bytes, file_bytes - 8 - header_bytes
    table = {name: _entry(path, name, entry, base, data_bytes) for name, entry in header.items()}
    end, previous = base, "the header"
    for name in sorted(table, key=lambda name: table[name][1:]):
        _, start, stop = table[name]
        if start != end:
            problem = "overlaps" if start < end else "leaves a gap after"
            raise corrupt(path, f"tensor {name!r} {problem} {previous} at byte {min(start, end)}")
        end, previous = stop, repr(name)
    if end != file_bytes:
        raise corrupt(path, f"{file_bytes - end} bytes after the last tensor belong to none")
    return table


def _entry(path: Path, name: str, entry: Any, base: int, data_bytes: int) -> tuple[TensorInfo, int, int]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise corrupt(path, f"the entry of tensor {name!r} must hold dtype, shape and data_offsets, got {entry!r:.200}")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise WeightsError(f"{path}: tensor {name!r} has dtype {entry['dtype']!r:.50}; supported: {', '.join(DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not is_shape(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise corrupt(path, f"tensor {name!r} has shape {shape!r:.100} and data_offsets {offsets!r:.100}")
    dtype = np.dtype(DTYPES[entry["dtype"]])
    begin, stop = offsets
    if not begin <= stop <= data_bytes:
        raise corrupt(path, f"tensor {name!r} lies at {offsets} of {data_bytes} data bytes")
    if math.prod(shape) * dtype.itemsize != stop - begin:
        raise corrupt(path, f"tensor {name!r} of shape {shape} and dtype {dtype} cannot fill {stop - begin} bytes")
    return TensorInfo(tuple(shape), dtype), base + begin, base + stop


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _find_files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files that make up a checkpoint and, if it is sharded, the index's map from tensor to file name."""
    if path.is_file():
        return [path], None
    if (path / SINGLE_NAME).is_file():
        return [path / SINGLE_NAME], None
    if (path / INDEX_NAME).is_file():
        return indexed_files(path, INDEX_NAME)
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(found) == 1:
        return found, None
    if found:
        raise WeightsError(
            f"{path} holds {len(found)} safetensors files but no {INDEX_NAME}; add the index or keep one file"
        )
    raise WeightsError(f"{path} holds no safetensors weights; expected {SINGLE_NAME} or {INDEX_NAME}")
