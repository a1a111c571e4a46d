"""Host. Files mapped read-only: views of their bytes, and pages that leave memory once they were read."""

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import numpy as np

from jaxspec.errors import WeightsError
from jaxspec.weights.reader import Index, TensorInfo, check_readable


class MappedFile:
    """Views into one file. They stay valid after `close`: the mapping ends with the last of them."""

    def __init__(self, path: Path):
        """Raises: WeightsError where the file cannot be mapped."""
        try:
            with path.open("rb") as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise WeightsError(f"cannot read {path}: {error}; fetch it again") from error
        self._bytes = np.frombuffer(self._map, np.uint8)

    def view(self, start: int, stop: int) -> np.ndarray:
        """The bytes from `start` up to `stop`, not copied."""
        return self._bytes[start:stop]

    def release(self, start: int, stop: int) -> None:
        """Lets the pages of these bytes leave memory; whoever looks at them again brings them back from the file."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > first and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)


class MappedReader(ABC):
    """A Reader whose tensors are views of mapped files; a form says where they lie, and what a view of one is."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo], files: Iterable[Path]):
        self.path, self.tensors = path, tensors
        self._files: dict[Path, MappedFile] | None = {file: MappedFile(file) for file in files}

    @abstractmethod
    def _span(self, name: str) -> tuple[Path, int, int]:
        """(file, first byte, past the last byte) of what leaves memory when the tensor is released."""

    @abstractmethod
    def _view(self, files: Mapping[Path, MappedFile], name: str) -> np.ndarray:
        """The tensor, none of it read yet."""

    def read(self, name: str, dtype: np.dtype | None = None, index: Index | None = None) -> np.ndarray:
        """One tensor or the part at `index`, cast to `dtype` if given; otherwise a read-only view of the file.

        Raises:
          WeightsError: no such tensor, or the reader is closed.
        """
        check_readable(self.path, self._files is not None, name, self.tensors)
        assert self._files is not None
        view = self._view(self._files, name)
        view = view if index is None else view[index]
        return view if dtype is None else view.astype(dtype, copy=False)

    def release(self, name: str) -> None:
        """Lets the tensor's pages leave memory; views of it stay valid."""
        if self._files is not None:
            file, start, stop = self._span(name)
            self._files[file].release(start, stop)

    def close(self) -> None:
        """Lets go of the files; arrays already read stay valid."""
        self._files = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
