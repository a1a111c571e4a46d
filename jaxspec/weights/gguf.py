"""Host. Reads a GGUF file: memory-mapped, quantised tensors dequantised row block by row block."""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.config.gguf_header import GgufTensor, read_gguf_header
from jaxspec.errors import WeightsError
from jaxspec.weights.mapped import MappedFile
from jaxspec.weights.reader import Index, TensorInfo, check_readable, is_shape

# Values dequantised at a time: small enough to stay in the cache until they are cast, large enough to amortise numpy.
BLOCK_VALUES = 1 << 18
# numpy works outside the interpreter's lock; more threads than this wait for memory.
NUM_THREADS = min(4, os.cpu_count() or 1)

_PLAIN_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}


class GgufReader:
    """A Reader over one GGUF file; `metadata` holds its keys, arrays as lists."""

    def __init__(self, path: str | os.PathLike[str]):
        """Maps the file and checks that every tensor lies inside it, apart from the others.

        Raises:
          WeightsError: a corrupt or truncated file, or a tensor type that cannot be dequantised.
        """
        self.path = Path(path)
        header = read_gguf_header(self.path)
        self.metadata: dict[str, Any] = header.metadata
        if (parts := header.metadata.get("split.count", 1)) != 1:
            raise WeightsError(
                f"{self.path} is one of {parts!r:.20} parts of a model; join them with llama.cpp's gguf-split --merge"
            )
        self._entries = header.tensors
        self._places = {name: _place(self.path, name, tensor) for name, tensor in header.tensors.items()}
        self.tensors = {
            name: TensorInfo(tensor.shape, plain or np.dtype(np.float32), is_quantized=plain is None)
            for name, tensor in header.tensors.items()
            for plain in (_PLAIN_DTYPES.get(self._places[name][0]),)
        }
        self._check_extents(header.file_bytes)
        self._file: MappedFile | None = MappedFile(self.path)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "gguf")  # starts none before the first quantised read

    def read(self, name: str, dtype: np.dtype | None = None, index: Index | None = None) -> np.ndarray:
        """One tensor or the part at `index`, cast to `dtype` if given; plain types are views of the file,
        quantised ones fresh arrays, dequantised in whole blocks of the last axis.

        Raises:
          WeightsError: no such tensor, or the reader is closed.
        """
        check_readable(self.path, self._file is not None, name, self.tensors)
        assert self._file is not None
        info, (type_name, num_bytes) = self.tensors[name], self._places[name]
        start = self._entries[name].offset
        data = self._file.view(start, start + num_bytes)
        if type_name in _PLAIN_DTYPES:
            plain = data.view(info.dtype).reshape(info.shape)
            plain = plain if index is None else plain[index]
            return plain if dtype is None else plain.astype(dtype, copy=False)
        wanted = np.dtype(np.float32) if dtype is None else np.dtype(dtype)
        if index is None:
            return _dequantize(data, type_name, info.shape, wanted, self._threads)
        return _dequantize_part(data, type_name, info.shape, wanted, self._threads, index)

    def release(self, name: str) -> None:
        """Lets the tensor's pages leave memory; views of it stay valid."""
        if self._file is not None:
            start = self._entries[name].offset
            self._file.release(start, start + self._places[name][1])

    def close(self) -> None:
        """Lets go of the file; arrays already read stay valid."""
        self._file = None
        self._threads.shutdown()

    def __enter__(self) -> "GgufReader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_extents(self, file_bytes: int) -> None:
        end, previous = 0, ""
        for name in sorted(self._entries, key=lambda name: (self._entries[name].offset, self._places[name][1])):
            start = self._entries[name].offset
            if start < end:
                raise WeightsError(
                    f"{self.path}: tensors {previous!r} and {name!r} overlap at byte {start}; "
                    "the file is corrupt, fetch it again"
                )
            end, previous = start + self._places[name][1], name
            if end > file_bytes:
                raise WeightsError(
                    f"{self.path}: tensor {name!r} ends at byte {end}, but the file ends at {file_bytes}; "
                    "the file is truncated or corrupt, fetch it again"
                )


def _place(path: Path, name: str, tensor: GgufTensor) -> tuple[str, int]:
    """(type name, bytes) of a tensor; refuses types without a dequantiser and rows that are not whole blocks."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        ggml_type = GGMLQuantizationType(tensor.ggml_type)
    except ValueError as error:
        raise WeightsError(f"{path}: tensor {name!r} has unknown type {tensor.ggml_type}; requantise it") from error
    if ggml_type.name not in _PLAIN_DTYPES and not _can_dequantize(ggml_type.name):
        raise WeightsError(
            f"{path}: tensor {name!r} has type {ggml_type.name}, which has no dequantiser; requantise it"
        )
    block_values, block_bytes = GGML_QUANT_SIZES[ggml_type]
    if not is_shape(tensor.shape):
        raise WeightsError(
            f"{path}: tensor {name!r} has shape {list(tensor.shape)}; the file is corrupt, fetch it again"
        )
    if tensor.shape[-1] % block_values:
        raise WeightsError(
            f"{path}: rows of {name!r} must be multiples of {block_values} for {ggml_type.name}, "
            f"got shape {list(tensor.shape)}; the file is corrupt, fetch it again"
        )
    return ggml_type.name, math.prod(tensor.shape) // block_values * block_bytes


@cache
def _can_dequantize(type_name: str) -> bool:
    """Whether gguf knows this type, asked by dequantising one block of zeros."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    ggml_type = GGMLQuantizationType[type_name]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[ggml_type][1]), np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


def _dequantize_part(
    data: np.ndarray,
    type_name: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    threads: ThreadPoolExecutor,
    index: Index,
) -> np.ndarray:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    start, stop, _ = index[-1].indices(shape[-1])
    first, end = start // block_values, -(-stop // block_values)
    row_bytes = shape[-1] // block_values * block_bytes
    blocks = data.reshape(*shape[:-1], row_bytes)[(*index[:-1], slice(first * block_bytes, end * block_bytes))]
    whole_blocks = (*blocks.shape[:-1], (end - first) * block_values)
    part = _dequantize(blocks, type_name, whole_blocks, dtype, threads)
    return part[..., start - first * block_values : stop - first * block_values]


def _dequantize(
    data: np.ndarray, type_name: str, shape: tuple[int, ...], dtype: np.dtype, threads: ThreadPoolExecutor
) -> np.ndarray:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    out = np.empty(shape, dtype)
    if not out.size:
        return out
    rows_in = data.reshape(out.size // shape[-1], -1)
    rows_out = out.reshape(-1, shape[-1])
    rows_per_block = max(1, BLOCK_VALUES // shape[-1])

    def fill(start: int) -> None:
        block = dequantize(rows_in[start : start + rows_per_block], GGMLQuantizationType[type_name])
        rows_out[start : start + rows_per_block] = block

    list(threads.map(fill, range(0, len(rows_in), rows_per_block)))  # a list, so that an error is raised here
    return out
