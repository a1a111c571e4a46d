"""Host. How a file's tensor becomes a part of a parameter: in whole, slice by slice, and back again.

A slice of the result is asked of `fetch`, which reads a slice of the tensor: a host that holds one shard of a parameter
touches no other. The inverse is what `jaxspec convert` writes another form's tensors with.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from jaxspec.weights.reader import Index

Fetch = Callable[[Index | None], np.ndarray]  # None: all of it
Reorder = Callable[[np.ndarray], np.ndarray]


@runtime_checkable
class Turn(Protocol):
    """A transform that can be applied to a slice, and undone; `TensorSource` takes any callable in its place."""

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        """The whole of it."""
        ...

    def part(self, fetch: Fetch, index: Index, shape: tuple[int, ...]) -> np.ndarray:
        """`self(tensor)[index]`, reading no more of the tensor of this shape than it needs."""
        ...

    def inverse(self, part: np.ndarray) -> np.ndarray:
        """The tensor, zero where the part holds nothing of it."""
        ...


def part_of(transform: Callable[[np.ndarray], np.ndarray] | None, fetch: Fetch, index: Index, shape: tuple[int, ...]):
    """`transform(tensor)[index]`; a transform that is no `Turn` sees all of the tensor (of mapped files, a view)."""
    if transform is None:
        return fetch(index)
    if isinstance(transform, Turn):
        return transform.part(fetch, index, shape)
    return transform(fetch(None))[index]


@dataclass(frozen=True)
class Axes:
    """Axes in another order. is_lone: the tensor has no first axis, which the result has, of length one."""

    order: tuple[int, ...]
    is_lone: bool = False

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        return (tensor[None] if self.is_lone else tensor).transpose(self.order)

    def part(self, fetch: Fetch, index: Index, shape: tuple[int, ...]) -> np.ndarray:
        """The slices change places as the axes do."""
        wanted = tuple(index[self.order.index(axis)] for axis in range(len(self.order)))
        if not self.is_lone:
            return self(fetch(wanted))
        at_lone = (*[slice(None)] * self.order.index(0), wanted[0])
        return self(fetch(wanted[1:]))[at_lone]

    def inverse(self, part: np.ndarray) -> np.ndarray:
        tensor = part.transpose(np.argsort(self.order))
        return tensor[0] if self.is_lone else tensor


@dataclass(frozen=True)
class RowOrder:
    """Rows in another order. reorder: does so for an array of any further axes, not adding nor leaving out a row."""

    reorder: Reorder

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        return self.reorder(tensor)

    def part(self, fetch: Fetch, index: Index, shape: tuple[int, ...]) -> np.ndarray:
        """From the first to the last of the rows that are needed: exactly these where the slice holds whole heads."""
        rows = self.reorder(np.arange(shape[0]))[index[0]]
        if not rows.size:
            return fetch((slice(0, 0), *index[1:]))
        first = int(rows.min())
        return fetch((slice(first, int(rows.max()) + 1), *index[1:]))[rows - first]

    def inverse(self, part: np.ndarray) -> np.ndarray:
        tensor = np.empty_like(part)
        tensor[self.reorder(np.arange(len(part)))] = part
        return tensor


@dataclass(frozen=True)
class PlusOne:
    """1 + w, in float32: in half precision the sum would lose most of w."""

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.astype(np.float32) + 1

    def part(self, fetch: Fetch, index: Index, shape: tuple[int, ...]) -> np.ndarray:
        return self(fetch(index))

    def inverse(self, part: np.ndarray) -> np.ndarray:
        return part.astype(np.float32) - 1


@dataclass(frozen=True)
class Flat:
    """[1, n] as it is stored -> [n]."""

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(-1)

    def part(self, fetch: Fetch, index: Index, shape: tuple[int, ...]) -> np.ndarray:
        return self(fetch(None))[index]

    def inverse(self, part: np.ndarray) -> np.ndarray:
        return part[None]


@dataclass(frozen=True)
class HeadRows:
    """Some rows of each head, [heads * head_rows, in] -> [heads, rows, in], or [heads, in, rows] where turned."""

    head_rows: int
    rows: slice
    is_turned: bool = False

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        num_heads = len(tensor) // self.head_rows
        heads = tensor.reshape(num_heads, self.head_rows, *tensor.shape[1:])[:, self.rows]
        return heads.swapaxes(1, 2) if self.is_turned else heads

    def part(self, fetch: Fetch, index: Index, shape: tuple[int, ...]) -> np.ndarray:
        """All rows of the heads that are needed."""
        heads = index[0]
        rows = slice(heads.start * self.head_rows, heads.stop * self.head_rows)
        last = index[1] if self.is_turned else index[2]
        rest = (slice(None), slice(None), index[2]) if self.is_turned else (slice(None), index[1], slice(None))
        return self(fetch((rows, last)))[rest]

    def inverse(self, part: np.ndarray) -> np.ndarray:
        part = part.swapaxes(1, 2) if self.is_turned else part
        tensor = np.zeros((len(part), self.head_rows, part.shape[2]), part.dtype)
        tensor[:, self.rows] = part
        return tensor.reshape(len(part) * self.head_rows, part.shape[2])
