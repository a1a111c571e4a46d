"""Host. What every checkpoint reader offers: a table of tensors, and lazy reads by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import numpy as np


@dataclass(frozen=True)
class TensorInfo:
    """shape: numpy order, matrices [out, in]; dtype: what `read` returns (float32 for quantised tensors)."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Reader(Protocol):
    """An open checkpoint. The table is known at once; bytes are touched only by `read`."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the checkpoint by its name in the file."""
        ...

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """One tensor, cast to `dtype` if given; it may be a read-only view of the mapped file.

        Raises:
          WeightsError: the checkpoint has no such tensor, or the reader is closed.
        """
        ...

    def close(self) -> None:
        """Lets go of the mapped files; arrays already read stay valid."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...
