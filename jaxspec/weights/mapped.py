"""Host. A file mapped read-only: views of its bytes, and pages that leave memory once they were read."""

import mmap
import os
from pathlib import Path

import numpy as np

from jaxspec.errors import WeightsError


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
