"""Host. Reads PyTorch's zip files (pytorch_model.bin, *.pt) without PyTorch, as views of the mapped files."""

import io
import math
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxspec.errors import WeightsError
from jaxspec.weights.mapped import MappedFile, MappedReader
from jaxspec.weights.reader import TensorInfo, is_shape
from jaxspec.weights.shards import check_index, corrupt, indexed_files, join_tables
from jaxspec.weights.torch_pickle import MAX_PICKLE_BYTES, StoredTensor, read_state_dict, read_value

SINGLE_NAME = "pytorch_model.bin"
INDEX_NAME = "pytorch_model.bin.index.json"
SUFFIXES = (".bin", ".pt", ".pth")
MAX_DIRECTORY_BYTES = 1 << 24  # a hundred thousand entries

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")  # the number that PyTorch before 1.6 began files with


class TorchReader(MappedReader):
    """A Reader over a folder (index and shards, or one file) or over one file."""

    def __init__(self, path: str | os.PathLike[str]):
        """Reads every pickle and checks each tensor against the bytes it is a view of.

        Raises:
          WeightsError: a missing shard, a corrupt, truncated or old file, a pickle that asks for anything but
            tensors, or an index that contradicts the files.
        """
        path = Path(path)
        files, weight_map = _find_files(path)
        table = join_tables(files, read_torch_table, path)
        if weight_map is not None:
            check_index(path / INDEX_NAME, weight_map, {name: file for name, (file, _) in table.items()})
        self._places = table
        infos = {name: TensorInfo(stored.shape, stored.dtype) for name, (_, (stored, _)) in table.items()}
        super().__init__(path, infos, files)

    def _span(self, name: str) -> tuple[Path, int, int]:
        """The whole storage, of which the tensor may be a part."""
        file, (stored, start) = self._places[name]
        return file, start, start + stored.storage.num_values * stored.storage.dtype.itemsize

    def _view(self, files: Mapping[Path, MappedFile], name: str) -> np.ndarray:
        file, (stored, start) = self._places[name]
        return _array(files[file], stored, start)


def torch_files(folder: Path) -> list[Path]:
    """The files of a folder that may be PyTorch's weights: what training leaves behind is none, nor a lone vector."""
    found = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file())
    others = ("training_args", "optimizer", "scheduler", "rng_", "mask_embedding")
    return [file for file in found if not file.name.startswith(others)]


def read_torch_table(path: Path) -> dict[str, tuple[StoredTensor, int]]:
    """{tensor name: (what it is a view of, where that storage's bytes begin)} of one file, all of it checked.

    Raises:
      WeightsError: as the reader does.
    """
    spans, pickle = _parts(path)
    try:
        tensors = read_state_dict(pickle)
    except ValueError as error:
        raise WeightsError(f"{path}: {error}") from error
    return {name: (stored, _check_view(path, name, stored, spans)) for name, stored in tensors.items()}


def read_torch_value(path: Path) -> Any:
    """What one small file holds, its tensors copied into arrays: a lone tensor, or a dictionary of such values.

    Raises:
      WeightsError: as the reader does.
    """
    spans, pickle = _parts(path)
    try:
        value = read_value(pickle)
    except ValueError as error:
        raise WeightsError(f"{path}: {error}") from error
    file = MappedFile(path)

    def copied(name: str, item: Any) -> Any:
        if not isinstance(item, StoredTensor):
            return item
        return np.array(_array(file, item, _check_view(path, name, item, spans)))

    if isinstance(value, dict):
        return {name: copied(name, item) for name, item in value.items()}
    return copied("the tensor", value)


def _parts(path: Path) -> tuple[dict[str, tuple[int, int]], bytes]:
    """(where each entry of the zip lies, the pickle)."""
    try:
        with path.open("rb") as file:
            _refuse_old_forms(path, file)
            return _read_zip(path, file)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error


def _array(file: MappedFile, stored: StoredTensor, start: int) -> np.ndarray:
    """A read-only view of the file, whose storage begins at `start`; bounds were checked before."""
    width = stored.dtype.itemsize
    if not math.prod(stored.shape):
        return np.empty(stored.shape, stored.dtype)
    last = sum((size - 1) * stride for size, stride in zip(stored.shape, stored.strides, strict=True))
    begin = start + stored.offset * width
    values = file.view(begin, begin + (last + 1) * width)
    strides = [stride * width for stride in stored.strides]
    return np.ndarray(stored.shape, stored.dtype, buffer=values.data, strides=strides)


def _refuse_old_forms(path: Path, file: BinaryIO) -> None:
    head = file.read(512)
    if head.startswith(b"PK"):
        return
    remedy = "load it with PyTorch where you trust it and save its state dict again, best as safetensors"
    if head.startswith(_LEGACY_MAGIC):
        raise WeightsError(
            f"{path} is in the form of PyTorch before 1.6, which is a bare pickle and not read; {remedy}"
        )
    if head[257:262] == b"ustar":
        raise WeightsError(f"{path} is a tar file, the form of PyTorch before 0.2, which is not read; {remedy}")
    raise WeightsError(f"{path} is not a PyTorch zip file (it must begin with b'PK', got {head[:4]!r}); {remedy}")


class _Bounded(io.BufferedIOBase):
    """A file that no one reads in one piece: zipfile would take a directory of any length into memory."""

    def __init__(self, file: BinaryIO, path: Path):
        self.file, self.path = file, path

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = MAX_DIRECTORY_BYTES + 1 if size is None or size < 0 else size
        content = self.file.read(min(wanted, MAX_DIRECTORY_BYTES + 1))
        if len(content) > MAX_DIRECTORY_BYTES:
            raise corrupt(self.path, f"its directory is longer than the {MAX_DIRECTORY_BYTES} bytes that are read")
        return content

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def seekable(self) -> bool:
        return True


def _read_zip(path: Path, file: BinaryIO) -> tuple[dict[str, tuple[int, int]], bytes]:
    """{storage key: (first byte, past the last byte)} and the pickle."""
    file_bytes = os.fstat(file.fileno()).st_size
    try:
        with zipfile.ZipFile(_Bounded(file, path)) as archive:  # pyright: ignore[reportArgumentType]
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OverflowError, struct.error, NotImplementedError, EOFError) as error:
        raise corrupt(path, f"its zip directory is not readable ({str(error)[:100]})") from error
    names = [entry.filename for entry in entries]
    pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise WeightsError(f"{path} holds {len(pickles)} data.pkl, a PyTorch file has one; give a file that it saved")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}constants.pkl" in names:
        raise WeightsError(f"{path} is a TorchScript program, which is not run; save its state dict instead")
    spans = _spans(path, file, file_bytes, entries)
    if (order := _content(file, spans.get(f"{root}byteorder"), 16)) not in (None, b"little"):
        raise WeightsError(f"{path} stores its bytes in order {order!r}; only b'little' is read: save it again")
    pickle = _content(file, spans[pickles[0]], MAX_PICKLE_BYTES)
    if pickle is None or len(pickle) < spans[pickles[0]][1] - spans[pickles[0]][0]:
        raise WeightsError(f"{path}: its pickle is longer than the {MAX_PICKLE_BYTES} bytes that are read; split it")
    keys = f"{root}data/"
    return {name.removeprefix(keys): span for name, span in spans.items() if name.startswith(keys)}, pickle


def _spans(path: Path, file: BinaryIO, file_bytes: int, entries: list[zipfile.ZipInfo]) -> dict[str, tuple[int, int]]:
    """Where each entry's bytes lie. They are stored as they are, inside the file, each apart from the others."""
    spans: dict[str, tuple[int, int]] = {}
    end, previous = 0, "the file's start"
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        name = entry.filename
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.file_size != entry.compress_size:
            raise WeightsError(
                f"{path}: entry {name!r:.100} is compressed or encrypted; PyTorch stores entries as they are, "
                "so nothing else is read: unpack and save it again"
            )
        if name in spans:
            raise corrupt(path, f"entry {name!r:.100} occurs twice")
        if not 0 <= entry.header_offset <= file_bytes - _LOCAL_HEADER.size:
            raise corrupt(path, f"entry {name!r:.100} begins at byte {entry.header_offset} of {file_bytes}")
        if entry.header_offset < end:
            raise corrupt(path, f"entry {name!r:.100} overlaps {previous} at byte {entry.header_offset}")
        file.seek(entry.header_offset)
        magic, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        local_name = file.read(name_bytes)
        if magic != b"PK\3\4" or local_name.decode("utf-8", "replace") != entry.orig_filename:
            raise corrupt(path, f"entry {name!r:.100} is not at byte {entry.header_offset}, where the directory has it")
        start = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        end, previous = start + entry.file_size, repr(name)[:100]
        if end > file_bytes:
            raise corrupt(path, f"entry {previous} ends at byte {end}, but the file ends at {file_bytes}")
        spans[name] = (start, end)
    return spans


def _content(file: BinaryIO, span: tuple[int, int] | None, at_most: int) -> bytes | None:
    if span is None:
        return None
    file.seek(span[0])
    return file.read(min(span[1] - span[0], at_most))


def _check_view(path: Path, name: str, stored: StoredTensor, spans: dict[str, tuple[int, int]]) -> int:
    """Where the tensor's storage begins, after checking that the tensor lies inside it."""
    storage, label = stored.storage, f"tensor {name!r:.100}"
    if storage.key not in spans:
        raise corrupt(path, f"{label} is a view of storage {storage.key!r:.50}, which is not in the file")
    start, stop = spans[storage.key]
    if storage.num_values * storage.dtype.itemsize != stop - start:
        raise corrupt(
            path,
            f"{label}: storage {storage.key!r:.50} of {storage.num_values} {storage.dtype} has {stop - start} bytes",
        )
    shape, strides = stored.shape, stored.strides
    described = f"shape {_short(shape)}, strides {_short(strides)} and offset {stored.offset!r:.30}"
    if len(shape) != len(strides) or min((stored.offset, *shape, *strides)) < 0 or not is_shape(shape):
        raise corrupt(path, f"{label} has {described}")
    room = (stop - start) // stored.dtype.itemsize
    size = math.prod(shape)
    last = stored.offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if size and last >= room:
        raise corrupt(path, f"{label} of {described} reaches past the {room} values of its storage")
    if size > room:
        raise WeightsError(
            f"{path}: {label} of {described} repeats the {room} values of its storage; save a contiguous copy"
        )
    return start


def _short(numbers: tuple[Any, ...]) -> str:
    return f"{list(numbers)!r:.60}"


def _find_files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files that make up a checkpoint and, if it is sharded, the index's map from tensor to file name."""
    if path.is_file():
        return [path], None
    if (path / SINGLE_NAME).is_file():
        return [path / SINGLE_NAME], None
    if (path / INDEX_NAME).is_file():
        return indexed_files(path, INDEX_NAME)
    found = torch_files(path) if path.is_dir() else []
    if len(found) == 1:
        return found, None
    names = ", ".join(file.name for file in found[:5])
    problem = f"{len(found)} PyTorch files ({names}) but no {INDEX_NAME}" if found else "no PyTorch file"
    raise WeightsError(f"{path} holds {problem}; keep one file, or add the index")
