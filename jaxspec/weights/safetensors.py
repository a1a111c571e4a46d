"""Host. Reads safetensors checkpoints, single or sharded, as views of the mapped files.

The header is parsed here and not by the safetensors package: its numpy front end cannot give float8, and gives
bfloat16 only after a side effect of importing ml_dtypes.
"""

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.errors import WeightsError
from jaxspec.weights.reader import TensorInfo, is_shape

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_DTYPES = {
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


class SafetensorsReader:
    """A Reader over a folder (index and shards, or one file) or over one .safetensors file."""

    def __init__(self, path: str | os.PathLike[str]):
        """Reads every header and checks it against its file and the index.

        Raises:
          WeightsError: a missing shard, a corrupt or truncated file, or an index that contradicts the files.
        """
        self.path = Path(path)
        files, weight_map = _find_files(self.path)
        self.tensors: dict[str, TensorInfo] = {}
        self._spans: dict[str, tuple[Path, int, int]] = {}
        for file in files:
            for name, (info, start, stop) in read_safetensors_header(file).items():
                if name in self._spans:
                    raise WeightsError(
                        f"tensor {name!r} is in both {self._spans[name][0].name} and {file.name}; "
                        f"one name may occur once: remove the stale file from {self.path}"
                    )
                self.tensors[name] = info
                self._spans[name] = (file, start, stop)
        if weight_map is not None:
            self._check_index(weight_map)
        self._maps: dict[Path, np.memmap] | None = {file: np.memmap(file, np.uint8, "r") for file in files}

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """One tensor, cast to `dtype` if given; otherwise a read-only view of the file.

        Raises:
          WeightsError: no such tensor, or the reader is closed.
        """
        if self._maps is None:
            raise WeightsError(f"{self.path} is closed; read tensors before closing the reader")
        if name not in self.tensors:
            raise WeightsError(f"{self.path} has no tensor {name!r}; it has {len(self.tensors)} others")
        info, (file, start, stop) = self.tensors[name], self._spans[name]
        view = self._maps[file][start:stop].view(info.dtype).reshape(info.shape)
        return view if dtype is None else view.astype(dtype, copy=False)

    def close(self) -> None:
        """Lets go of the files; arrays already read stay valid."""
        self._maps = None

    def __enter__(self) -> "SafetensorsReader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_index(self, weight_map: dict[str, str]) -> None:
        wrong = [
            f"{name!r} should be in {file}"
            + ("" if name not in self._spans else f", is in {self._spans[name][0].name}")
            for name, file in weight_map.items()
            if name not in self._spans or self._spans[name][0].name != file
        ]
        wrong += [f"{name!r} is in {self._spans[name][0].name}" for name in self._spans if name not in weight_map]
        if wrong:
            raise WeightsError(
                f"{self.path / INDEX_NAME} contradicts the shards: {'; '.join(wrong[:20])}"
                f"{f'; and {len(wrong) - 20} more' if len(wrong) > 20 else ''}; fetch the checkpoint again"
            )


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
                raise _corrupt(path, f"its header claims {header_bytes} bytes of a file of {file_bytes}")
            raw = file.read(header_bytes)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"its header is not valid JSON ({str(error)[:200]})") from error
    if not isinstance(header, dict):
        raise _corrupt(path, "its header is not a JSON object")
    header.pop("__metadata__", None)

    base, data_bytes = 8 + header_bytes, file_bytes - 8 - header_bytes
    table = {name: _entry(path, name, entry, base, data_bytes) for name, entry in header.items()}
    end, previous = base, "the header"
    for name in sorted(table, key=lambda name: table[name][1:]):
        _, start, stop = table[name]
        if start != end:
            problem = "overlaps" if start < end else "leaves a gap after"
            raise _corrupt(path, f"tensor {name!r} {problem} {previous} at byte {min(start, end)}")
        end, previous = stop, repr(name)
    if end != file_bytes:
        raise _corrupt(path, f"{file_bytes - end} bytes after the last tensor belong to none")
    return table


def _entry(path: Path, name: str, entry: Any, base: int, data_bytes: int) -> tuple[TensorInfo, int, int]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _corrupt(
            path, f"the entry of tensor {name!r} must hold dtype, shape and data_offsets, got {entry!r:.200}"
        )
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        raise WeightsError(f"{path}: tensor {name!r} has dtype {entry['dtype']!r:.50}; supported: {', '.join(_DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not is_shape(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _corrupt(path, f"tensor {name!r} has shape {shape!r:.100} and data_offsets {offsets!r:.100}")
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    begin, stop = offsets
    if not begin <= stop <= data_bytes:
        raise _corrupt(path, f"tensor {name!r} lies at {offsets} of {data_bytes} data bytes")
    if math.prod(shape) * dtype.itemsize != stop - begin:
        raise _corrupt(path, f"tensor {name!r} of shape {shape} and dtype {dtype} cannot fill {stop - begin} bytes")
    return TensorInfo(tuple(shape), dtype), base + begin, base + stop


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"name {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return table


def _corrupt(path: Path, problem: str) -> WeightsError:
    return WeightsError(f"{path}: {problem}; the file is truncated or corrupt, fetch it again")


def _find_files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files that make up a checkpoint and, if it is sharded, the index's map from tensor to file name."""
    if path.is_file():
        return [path], None
    if (path / SINGLE_NAME).is_file():
        return [path / SINGLE_NAME], None
    if (path / INDEX_NAME).is_file():
        weight_map = _read_index(path / INDEX_NAME)
        names = sorted(set(weight_map.values()))
        if missing := [name for name in names if not (path / name).is_file()]:
            raise WeightsError(f"{path} lacks shards that {INDEX_NAME} names: {', '.join(missing)}; fetch them")
        return [path / name for name in names], weight_map
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(found) == 1:
        return found, None
    if found:
        raise WeightsError(
            f"{path} holds {len(found)} safetensors files but no {INDEX_NAME}; add the index or keep one file"
        )
    if path.is_dir() and (pickles := sorted(path.glob("*.bin")) + sorted(path.glob("*.pt"))):
        raise WeightsError(f"{path} holds only pickled weights ({pickles[0].name}); convert them to safetensors")
    raise WeightsError(f"{path} holds no safetensors weights; expected {SINGLE_NAME} or {INDEX_NAME}")


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(), object_pairs_hook=_unique_pairs)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _corrupt(
            path, f"no weight_map can be read from it ({type(error).__name__}: {str(error)[:200]})"
        ) from error
    # A shard is a file of this folder: an index from the network must not point anywhere else.
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and name == Path(name).name and name not in ("", "..") for name in weight_map.values()
    ):
        raise _corrupt(path, "weight_map must map tensor names to plain file names")
    return weight_map
