"""Host. A drafter's files: parameters taken apart into the tensors that published layouts have, and written."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxspec.weights.load import flatten
from jaxspec.weights.names import NameTable
from jaxspec.weights.reader import Index, TensorInfo, check_readable
from jaxspec.weights.write import planned_dtypes, write_shards

MAX_SHARD_BYTES = 4 * 2**30


def pieces(params: Any, specs: Any, table: NameTable, rows: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """{tensor name: array}: each parameter, or the pieces that its sources would join along axis 0.

    Args:
        params: a tree shaped as specs.
        table: where each parameter would be read from.
        rows: last word of a path -> rows of its pieces, where these are not equal.
    """
    tensors = {}
    for path, spec in flatten(specs):
        array: Any = params
        for word in path.split("."):
            array = array[int(word) if isinstance(array, list | tuple) else word]
        array, names = np.asarray(array), table.sources[path].names
        assert array.shape == spec.shape, path
        sizes = rows.get(path.rpartition(".")[2], [spec.shape[0] // len(names)] * len(names))
        parts = np.split(array, np.cumsum(sizes)[:-1]) if len(names) > 1 else [array]
        tensors |= dict(zip(names, parts, strict=True))
    return tensors


def write_drafter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], dtype: str) -> None:
    """A folder with config.json and model.safetensors, whole or not at all; one that is there is replaced."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    text = json.dumps({**config, "torch_dtype": dtype}, indent=2)
    (partial / "config.json").write_text(text + "\n", encoding="utf-8")
    reader = _Arrays(tensors)
    write_shards(reader, partial, "safetensors", planned_dtypes(reader, dtype), MAX_SHARD_BYTES)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)


def exporter(
    config: Mapping[str, Any],
    specs: Any,
    table: NameTable,
    dtype: str,
    *,
    rows: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Callable[[Any, Path], None]:
    """(params, folder) -> None: a `Trainer`'s export, where the files hold the parameters and nothing else.

    Args:
        config: of config.json.
        specs, table, rows: as `pieces` takes them.
    """
    return lambda params, folder: write_drafter(folder, config, pieces(params, specs, table, rows), dtype)


class _Arrays:
    """Arrays in memory as a `Reader`."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays = dict(arrays)
        self.tensors = {name: TensorInfo(array.shape, array.dtype) for name, array in self._arrays.items()}

    def read(self, name: str, dtype: np.dtype | None = None, index: Index | None = None) -> np.ndarray:
        """One tensor, or the part at `index`."""
        check_readable("the drafter", True, name, self.tensors)
        array = self._arrays[name] if index is None else self._arrays[name][index]
        return array if dtype is None else array.astype(dtype, copy=False)

    def release(self, name: str) -> None:
        """Nothing is mapped."""

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> "_Arrays":
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None
