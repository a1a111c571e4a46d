"""Host. The form of a name table, written by models and read by the loader: which tensors fill which parameter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Transform = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class TensorSource:
    """One parameter's origin: these file tensors, each through its transform, concatenated on axis 0.

    names: file tensor names in order; transforms: one a name, None meaning as it is.
    """

    names: tuple[str, ...]
    transforms: tuple[Transform | None, ...] = ()

    def transform_of(self, index: int) -> Transform | None:
        """The transform of the index-th name, if any."""
        return self.transforms[index] if self.transforms else None


@dataclass(frozen=True)
class NameTable:
    """sources: parameter path ("layers.3.qkv.weight") -> its origin; ignored: regular expressions (fullmatch) of
    file tensors that carry nothing a model needs (say, old rotary buffers) and may stay unread."""

    sources: Mapping[str, TensorSource]
    ignored: tuple[str, ...] = ()
