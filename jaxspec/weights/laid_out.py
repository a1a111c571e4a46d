"""Host. Brings a checkpoint's parameters to the devices of a mesh: each device is handed its own stretches, and no more
is read than these."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxspec.distributed.rules import Layout
from jaxspec.types import ArraySpec
from jaxspec.weights.load import Parameter, Put, Readable, put_shards
from jaxspec.weights.reader import Index, shape_at

LayoutOf = Callable[[ArraySpec], Layout]


@dataclass(frozen=True)
class LaidOut:
    """An array as it lies on a mesh: each device's stretches one behind the other, filled up with zeros."""

    stored: Readable
    dtype: np.dtype
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes on the mesh."""
        return self.layout.shape

    def read(self, index: Index | None = None) -> np.ndarray:
        """The part at `index`: of the axis that is split, one device's or all."""
        axis, shape = self.layout.axis, self.layout.shape
        if axis is None:
            return self.stored.read(index)
        index = tuple(slice(None) for _ in shape) if index is None else index
        index = tuple(slice(*one.indices(size)) for one, size in zip(index, shape, strict=True))
        out = np.zeros(shape_at(shape, index), self.dtype)
        length, at = shape[axis] // len(self.layout.stretches), 0
        for own in self.layout.stretches[index[axis].start // length : index[axis].stop // length]:
            for start, end, zeros in own:
                if end > start:
                    place = (*[slice(None)] * axis, slice(at, at + end - start))
                    out[place] = self.stored.read((*index[:axis], slice(start, end), *index[axis + 1 :]))
                at += end - start + zeros
        return out


def on_mesh(mesh: Mesh, layout_of: LayoutOf) -> Put:
    """A `put` for `load` that gives each device of the mesh its part."""

    def put(parameter: Parameter) -> jax.Array:
        layout = layout_of(parameter.spec)
        return put_shards(LaidOut(parameter, np.dtype(parameter.spec.dtype), layout), NamedSharding(mesh, layout.spec))

    return put


def place_on_mesh(mesh: Mesh, layout_of: LayoutOf) -> Callable[[ArraySpec, np.ndarray], jax.Array]:
    """The same for arrays that are in memory already."""

    def place(spec: ArraySpec, array: np.ndarray) -> jax.Array:
        layout = layout_of(spec)
        return put_shards(LaidOut(_InMemory(array), array.dtype, layout), NamedSharding(mesh, layout.spec))

    return place


@dataclass(frozen=True)
class _InMemory:
    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, index: Index | None = None) -> np.ndarray:
        return self.array if index is None else self.array[index]
