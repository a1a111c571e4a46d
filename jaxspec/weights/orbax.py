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
from jaxspec.weights.reader import Index, TensorInfo, check_readable, is_shape, shape_at
from jaxspec.weights.shards import check_index, corrupt, indexed_files, join_tables

INDEX_NAME = "orbax.index.json"
CHUNK_BYTES = 4 << 20  # what is read at once of a tensor, a square of a matrix: a shard of one reads little else
logger = logging.getLogger(__name__)


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
        self._one_chunk: set[Path] = set()
        self._is_open = True

    def read(self, name: str, dtype: np.dtype | None = None, index: Index | None = None) -> np.ndarray:
        """One tensor or the part at `index` as a fresh array, cast to `dtype` if given. A part costs the chunks that
        hold some of it: `jaxspec convert` writes chunks of at most CHUNK_BYTES, other programs often one a tensor.

        Raises:
          WeightsError: no such tensor, its chunks are corrupt, or the reader is closed.
        """
        check_readable(self.path, self._is_open, name, self.tensors)
        info, folder = self.tensors[name], self._folders[name]
        try:
            array = self._read(folder, name, info.shape, index)
        except Exception as error:  # Orbax and TensorStore raise whatever their layers do
            raise corrupt(folder, f"tensor {name!r} cannot be read ({_first_line(error)})") from error
        shape = info.shape if index is None else shape_at(info.shape, index)
        if array.shape != shape or array.dtype != info.dtype:
            raise corrupt(folder, f"tensor {name!r} is {array.shape} {array.dtype}, its metadata says {info}")
        return array if dtype is None else array.astype(dtype, copy=False)

    def _read(self, folder: Path, name: str, shape: tuple[int, ...], index: Index | None) -> np.ndarray:
        """Orbax restores whole trees, with more in memory than a tensor; the arrays under it are TensorStore's."""
        import tensorstore

        uses_zarr3 = json.loads((folder / "_METADATA").read_text(encoding="utf-8")).get("use_zarr3", False)
        spec = {
            "driver": "zarr3" if uses_zarr3 else "zarr",
            "kvstore": {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.absolute()}/"}, "path": name},
        }
        stored = tensorstore.open(spec, read=True, open=True).result()
        if index is None:
            return np.asarray(stored.read().result())
        if stored.chunk_layout.read_chunk.shape == shape and folder not in self._one_chunk:
            self._one_chunk.add(folder)
            logger.warning(
                "%s stores each tensor in one chunk, so that a part of one costs all of it; `jaxspec convert` writes "
                "smaller chunks",
                folder,
            )
        return np.asarray(stored[index].read().result())

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
        chunks = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in tensors}
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(dict(tensors), save_args=chunks))


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
