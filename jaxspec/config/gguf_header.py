"""Host. The head of a GGUF file as plain Python: its metadata and its tensor table.

Written by hand although the gguf package has a reader, because that one takes 2.5 s for SmolLM2's 98,000 vocabulary
strings (this takes a tenth of a second, and both weights and text need it), and believes every length it is told.
Here each length is checked against the file before it is used.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import WeightsError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4

# The value types of the format; 8 is a string, 9 an array.
_SCALAR_DTYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One row of the tensor table. shape: numpy order ([out, in]); offset: bytes from the start of the file."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """metadata: values as Python scalars, strings and lists; file_bytes: size of the whole file."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    file_bytes: int


def read_gguf_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Reads metadata and tensor table; tensor data is not touched.

    Raises:
      WeightsError: not a GGUF file, an unsupported version, or lengths that do not fit the file.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            if file_bytes < 24 or file.read(4) != MAGIC:
                raise WeightsError(f"{path} is not a GGUF file (it must begin with {MAGIC!r}); give a .gguf file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data, path), file_bytes)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error


class _Cursor:
    """A position in the mapped file that never moves past its end."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.size, self.position = data, path, len(data), 4

    def corrupt(self, problem: str) -> WeightsError:
        return WeightsError(f"{self.path}: {problem}; the file is truncated or corrupt, fetch it again")

    def advance(self, num_bytes: int, what: str) -> int:
        """Claims the next bytes and returns where they start."""
        start = self.position
        if num_bytes > self.size - start:
            raise self.corrupt(f"{what} needs {num_bytes} bytes at byte {start}, but the file ends at {self.size}")
        self.position = start + num_bytes
        return start

    def unpack(self, form: str, what: str) -> Any:
        return struct.unpack_from(form, self.data, self.advance(struct.calcsize(form), what))[0]

    def string(self, what: str) -> str:
        length = self.unpack("<Q", what)
        start = self.advance(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{what} at byte {start} is not UTF-8") from error

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            return self.scalars(kind, 1, what)[0]
        item_kind, count = self.unpack("<I", what), self.unpack("<Q", what)
        return self.strings(count, what) if item_kind == _STRING else self.scalars(item_kind, count, what)

    def scalars(self, kind: int, count: int, what: str) -> list[Any]:
        if kind not in _SCALAR_DTYPES:
            raise self.corrupt(f"{what} has value type {kind}, which GGUF does not define here")
        dtype = np.dtype(_SCALAR_DTYPES[kind])
        start = self.advance(count * dtype.itemsize, what)
        # frombuffer would hold the map open; the copy inside tolist does not.
        return np.frombuffer(self.data[start : start + count * dtype.itemsize], dtype).tolist()

    def strings(self, count: int, what: str) -> list[str]:
        """The vocabulary path: a plain loop over local names, since there may be half a million of them."""
        if count * 8 > self.size - self.position:
            raise self.corrupt(f"{what} claims {count} strings, more than the rest of the file can hold")
        data, size, position, values = self.data, self.size, self.position, []
        length_of = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                (length,) = length_of(data, position)
                position += 8 + length
                if position > size:
                    raise self.corrupt(f"a string of {what} ends at byte {position}, but the file ends at {size}")
                values.append(data[position - length : position].decode())
        except (struct.error, UnicodeDecodeError) as error:
            raise self.corrupt(f"{what} breaks off or is not UTF-8 near byte {position}") from error
        self.position = position
        return values


def _parse(cursor: _Cursor, file_bytes: int) -> GgufHeader:
    version = cursor.unpack("<I", "the version")
    if version not in SUPPORTED_VERSIONS:
        if version & 0xFFFF == 0:
            raise WeightsError(f"{cursor.path} is a big-endian GGUF file; only little-endian files are supported")
        raise WeightsError(f"{cursor.path} has GGUF version {version}; supported: {SUPPORTED_VERSIONS}")
    num_tensors, num_keys = cursor.unpack("<Q", "the tensor count"), cursor.unpack("<Q", "the key count")

    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.string(f"the name of key {index}")
        if key in metadata:
            raise cursor.corrupt(f"key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.unpack("<I", f"the type of {key!r}"), repr(key))

    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.corrupt(f"general.alignment must be a power of two, got {alignment!r}")

    rows: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for index in range(num_tensors):
        name = cursor.string(f"the name of tensor {index}")
        if name in rows:
            raise cursor.corrupt(f"tensor {name!r} occurs twice")
        num_dims = cursor.unpack("<I", f"the rank of {name!r}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise cursor.corrupt(f"tensor {name!r} has {num_dims} dimensions, allowed 1 to {MAX_DIMS}")
        dims = [cursor.unpack("<Q", f"the shape of {name!r}") for _ in range(num_dims)]
        ggml_type, offset = cursor.unpack("<I", f"the type of {name!r}"), cursor.unpack("<Q", f"the place of {name!r}")
        if offset % alignment:
            raise cursor.corrupt(f"tensor {name!r} starts at {offset}, not a multiple of the alignment {alignment}")
        rows[name] = (tuple(reversed(dims)), ggml_type, offset)

    base = -(-cursor.position // alignment) * alignment
    tensors = {name: GgufTensor(shape, ggml_type, base + offset) for name, (shape, ggml_type, offset) in rows.items()}
    return GgufHeader(metadata, tensors, file_bytes)
