"""Host. Reads and writes checkpoints of Orbax: folders of chunks, one folder a shard, read a tensor at a time.

The names are those of the Hugging Face folder that was converted, in one flat tree a shard, so that any program with
Orbax can read one; an index beside them says which shard holds a tensor.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # so that numpy knows the names bfloat16 and float8
import numpy as np

from jaxspec.errors import WeightsError
from jaxspec.weights.reader import TensorInfo, check_readable, is_shape
from jaxspec.weights.shards import check_index, corrupt, indexed_files, join_tables

INDEX_NAME = "orbax.index.json"


class OrbaxReader:
    """A Reader over a folder with an index of Orbax shards."""

    def __init__(self, path: str | os.PathLike[str]):
        """Reads the metadata of every shard and checks it against the index.

        Raises:
          WeightsError: a missing or corrupt shard, or an index that contradicts the shards.
        """
        self.path = Path(path)
        folders, weight_map = indexed_files(self.path, INDEX_NAME, is_there=Path.is_dir)
        self._checkpointer = _checkpointer()
        table = join_tables(folders, self._metadata, self.path)
        self._folders = {name: folder for name, (folder, _) in table.items()}
        check_index(self.path / INDEX_NAME, weight_map, self._folders)
        self.tensors = {name: info for name, (_, info) in table.items()}
        self._is_open = True

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """One tensor as a fresh array, cast to `dtype` if given.

        Raises:
          WeightsError: no such tensor, its chunks are corrupt, or the reader is closed.
        """
        check_readable(self.path, self._is_open, name, self.tensors)
        import orbax.checkpoint as ocp

        info, folder = self.tensors[name], self._folders[name]
        wanted = ocp.args.PyTreeRestore(
            item={name: 0.0},
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        try:
            array = np.asarray(self._checkpointer.restore(folder.absolute(), args=wanted)[name])
        except Exception as error:  # Orbax and TensorStore raise whatever their layers do
            raise corrupt(folder, f"tensor {name!r} cannot be read ({_first_line(error)})") from error
        if array.shape != info.shape or array.dtype != info.dtype:
            raise corrupt(folder, f"tensor {name!r} is {array.shape} {array.dtype}, its metadata says {info}")
        return array if dtype is None else array.astype(dtype, copy=False)

    def release(self, name: str) -> None:
        """Nothing to let go of: a read tensor is its reader's own."""

    def close(self) -> None:
        """Ends reading; arrays already read stay valid."""
        if self._is_open:
            self._is_open = False
            self._checkpointer.close()

    def __enter__(self) -> "OrbaxReader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _metadata(self, folder: Path) -> dict[str, TensorInfo]:
        try:
            tree = self._checkpointer.metadata(folder.absolute()).item_metadata.tree
            infos = {name: TensorInfo(tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in tree.items()}
        except Exception as error:  # as above
            raise corrupt(folder, f"its metadata cannot be read ({_first_line(error)})") from error
        for name, info in infos.items():
            if not is_shape(info.shape):
                raise corrupt(folder, f"tensor {name!r} has shape {list(info.shape)}")
        return infos


def write_orbax_shard(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes one shard, all of it in memory at once."""
    import orbax.checkpoint as ocp

    with _checkpointer() as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(dict(tensors)))


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    """Writes the index that makes a folder of shards a checkpoint."""
    text = json.dumps({"metadata": {"format": "orbax"}, "weight_map": dict(weight_map)}, indent=2)
    (folder / INDEX_NAME).write_text(text, encoding="utf-8")


def _checkpointer() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise WeightsError("Orbax checkpoints need the package orbax-checkpoint; install jaxspec[orbax]") from error
    # It tells of every call, and warns that shardings are missing where host arrays are all that is wanted.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
