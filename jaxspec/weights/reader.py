"""Host. What every checkpoint reader offers: a table of tensors, and lazy reads by name."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from jaxspec.errors import WeightsError

MAX_DIMS = 8
Index = tuple[slice, ...]


@dataclass(frozen=True)
class TensorInfo:
    """shape: numpy order, matrices [out, in]; dtype: what `read` returns (float32 for quantised tensors)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    is_quantized: bool = False


def is_shape(sizes: Sequence[int]) -> bool:
    """Whether numpy can make an array of this shape, if only an empty one: a header may say anything."""
    return len(sizes) <= MAX_DIMS and math.prod(max(size, 1) for size in sizes) < 2**48


def shape_at(shape: Sequence[int], index: Index) -> tuple[int, ...]:
    """The shape of an array's part."""
    return tuple(len(range(size)[one]) for size, one in zip(shape, index, strict=True))


def check_readable(path: str | os.PathLike[str], is_open: bool, name: str, tensors: Mapping[str, TensorInfo]) -> None:
    """Raises WeightsError where a reader is asked for what it cannot give."""
    if not is_open:
        raise WeightsError(f"{path} is closed; read tensors before closing the reader")
    if name not in tensors:
        raise WeightsError(f"{path} has no tensor {name!r}; it has {len(tensors)} others")


@runtime_checkable
class Reader(Protocol):
    """An open checkpoint. The table is known at once; bytes are touched only by `read`."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the checkpoint by its name in the file."""
        ...

    def read(self, name: str, dtype: np.dtype | None = None, index: Index | None = None) -> np.ndarray:
        """One tensor, cast to `dtype` if given; it may be a read-only view of the mapped file.

        index: one slice an axis, where a part of the tensor is wanted. No more of the file is read than holds the part
        in whole blocks: pages of a mapped file, blocks of quantised values, chunks of Orbax.

        Raises:
          WeightsError: the checkpoint has no such tensor, or the reader is closed.
        """
        ...

    def release(self, name: str) -> None:
        """Lets the tensor's pages of the file leave memory, once it was used; views of it stay valid."""
        ...

    def close(self) -> None:
        """Lets go of the mapped files; arrays already read stay valid."""
        ...

    def __enter__(self) -> "Reader": ...

    def __exit__(self, *exc_info: object) -> None: ...
