"""Host. Linear maps as 8-bit integers with a scale an output channel, made while a checkpoint is loaded."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxspec.types import ArraySpec, Int8Weight
from jaxspec.weights.load import Parameter, Put, copy_to_device

Place = Callable[[ArraySpec, np.ndarray], jax.Array]

MAX_INT8 = 127  # -128 is left out, so that the range is symmetric


def quantize(weight_oi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values i8[o, i], scale f32[o]): each row's largest magnitude becomes 127, a row of zeros has scale 1."""
    weight_oi = weight_oi.astype(np.float32, copy=False)
    largest_o = np.abs(weight_oi).max(axis=1, initial=0.0)
    scale_o = np.where(largest_o > 0, largest_o / MAX_INT8, 1.0).astype(np.float32)
    return np.rint(weight_oi / scale_o[:, None]).clip(-MAX_INT8, MAX_INT8).astype(np.int8), scale_o


def int8_shapes(specs: Any, names: tuple[str, ...]) -> list[tuple[int, ...]]:
    """[out, in] of each parameter that becomes an `Int8Weight`; names: as `Int8Put` takes them."""
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, ArraySpec))
    return [spec.shape for path, spec in leaves if path[-1].key in names]


class Int8Put:
    """How to load a tree whose parameters of some names become `Int8Weight`s: the specs to read, and a `put`."""

    def __init__(
        self, specs: Any, names: tuple[str, ...], dtype: str, *, put: Put | None = None, place: Place | None = None
    ):
        """names: last words of their paths; dtype: what the products are taken in; put, place: how other parameters
        and, of these, their integers and scales are brought to the devices, by default to one."""
        self._names, self._dtype = names, dtype
        self._put = put or (lambda parameter: copy_to_device(parameter.read()))
        self._place = place or (lambda _, array: copy_to_device(array))
        # Read in float32: integers made of what was rounded before would be rounded twice.
        self.specs = jax.tree_util.tree_map_with_path(
            lambda path, spec: replace(spec, dtype=np.float32) if self._is_int8(path[-1].key) else spec,
            specs,
            is_leaf=lambda leaf: isinstance(leaf, ArraySpec),
        )

    def __call__(self, parameter: Parameter) -> Any:
        if not self._is_int8(parameter.path.rpartition(".")[2]):
            return self._put(parameter)
        # All of it, wherever it goes: an output channel's scale is that of its whole row.
        values_oi, scale_o = quantize(parameter.read())
        spec = parameter.spec
        scales = replace(spec, shape=spec.shape[:1], axes=spec.axes[:1])
        return Int8Weight(
            values_oi=self._place(spec, values_oi), scale_o=self._place(scales, scale_o), dtype=self._dtype
        )

    def _is_int8(self, name: str) -> bool:
        return name in self._names
