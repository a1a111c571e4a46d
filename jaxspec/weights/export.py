"""Host. A GGUF checkpoint's tensors as a Hugging Face folder would have them: by those names, in those pieces."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxspec.errors import WeightsError
from jaxspec.weights.load import Parameter, flatten, shape_of
from jaxspec.weights.names import NameTable, Transform
from jaxspec.weights.reader import Index, Reader, TensorInfo, check_readable
from jaxspec.weights.transforms import Axes, PlusOne, Turn

REMEDY = "convert the model's Hugging Face folder instead, or load the GGUF file as it is"


@dataclass(frozen=True)
class _Origin:
    """Rows of a parameter that one tensor is made of, and the transform that would read them from it."""

    parameter: Parameter
    rows: slice
    transform: Transform | None

    def read(self, dtype: np.dtype) -> np.ndarray:
        # Arithmetic is for the file's own precision; anything else may be done to what is cast already.
        is_arithmetic = isinstance(self.transform, PlusOne)
        spec = replace(self.parameter.spec, dtype=np.dtype(np.float32) if is_arithmetic else dtype)
        index = (self.rows, *[slice(None)] * (len(spec.shape) - 1))
        part = replace(self.parameter, spec=spec).read(index)
        return self.undo(part).astype(dtype, copy=False)

    def undo(self, part: np.ndarray) -> np.ndarray:
        return part if self.transform is None else self.transform.inverse(part)  # pyright: ignore[reportFunctionMemberAccess]


class RenamedReader:
    """A Reader over a GGUF file: each tensor of a Hugging Face folder, made of the parameters that it would fill."""

    def __init__(self, reader: Reader, origins: Mapping[str, list[_Origin]]):
        """origins: by new name; a tensor of several is their sum, each zero where it holds nothing of it."""
        self._reader, self._origins = reader, dict(origins)
        self.tensors = {}
        for name, (first, *_) in self._origins.items():
            info = reader.tensors[first.parameter.source.names[0]]
            shape = (len(range(*first.rows.indices(first.parameter.spec.shape[0]))), *first.parameter.spec.shape[1:])
            stand_in = first.undo(np.broadcast_to(np.zeros((), np.int8), shape))
            self.tensors[name] = TensorInfo(stand_in.shape, info.dtype, info.is_quantized)

    def read(self, name: str, dtype: np.dtype | None = None, index: Index | None = None) -> np.ndarray:
        """One tensor or the part at `index`, cast to `dtype` if given.

        Raises:
          WeightsError: no such tensor, or the reader is closed.
        """
        check_readable("the renamed checkpoint", True, name, self.tensors)
        wanted = self.tensors[name].dtype if dtype is None else np.dtype(dtype)
        first, *others = self._origins[name]
        array = first.read(wanted)
        for origin in others:
            array = array + origin.read(wanted)
        return array if index is None else array[index]

    def release(self, name: str) -> None:
        """Lets the tensor's pages leave memory; views of it stay valid."""
        for origin in self._origins[name]:
            for stored in origin.parameter.source.names:
                self._reader.release(stored)

    def close(self) -> None:
        """Lets go of the files; arrays already read stay valid."""
        self._reader.close()

    def __enter__(self) -> "RenamedReader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def renamed(reader: Reader, specs: Any, found: NameTable, wanted: NameTable) -> RenamedReader:
    """The tensors of a GGUF file under their Hugging Face names.

    Args:
      reader: the open file.
      specs: the family's.
      found, wanted: its name tables for "gguf" and for "hf".

    Raises:
      WeightsError: a parameter is made of tensors in a way that cannot be undone.
    """
    origins: dict[str, list[_Origin]] = {}
    for path, spec in flatten(specs):
        source, target = found.sources[path], wanted.sources[path]
        parameter, start = Parameter(path, spec, reader, source), 0
        lengths = _lengths(parameter, target.names, target.transforms)
        for number, (name, length) in enumerate(zip(target.names, lengths, strict=True)):
            transform = target.transform_of(number)
            if transform is not None and not isinstance(transform, Turn):
                raise WeightsError(f"{path} cannot be turned back into {name}; {REMEDY}")
            origins.setdefault(name, []).append(_Origin(parameter, slice(start, start + length), transform))
            start += length
    return RenamedReader(reader, origins)


def _lengths(parameter: Parameter, names: tuple[str, ...], transforms: tuple[Transform | None, ...]) -> list[int]:
    """Rows of the parameter that each of these tensors fills: as many as the file's own pieces, or one expert."""
    stored, spec = parameter.source.names, parameter.spec
    if len(names) == 1:
        return [spec.shape[0]]
    if len(names) == len(stored):
        tensors = parameter.reader.tensors
        return [shape_of(parameter.source, [tensors[name]], number)[0] for number, name in enumerate(stored)]
    if len(names) == spec.shape[0] and all(isinstance(turn, Axes) and turn.is_lone for turn in transforms):
        return [1] * len(names)
    raise WeightsError(
        f"{parameter.path} is stored in other pieces in Hugging Face folders than in GGUF files; {REMEDY}"
    )
