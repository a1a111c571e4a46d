"""Host. Fills a model's parameters from a checkpoint, strictly: all of them, exactly, and nothing left over."""

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import WeightsError
from jaxspec.types import ArraySpec
from jaxspec.weights.names import NameTable, TensorSource
from jaxspec.weights.reader import Index, Reader, TensorInfo, shape_at
from jaxspec.weights.transforms import part_of

logger = logging.getLogger(__name__)

MAX_LISTED = 40  # problems of one kind spelled out; a wrong checkpoint has thousands


@dataclass(frozen=True)
class Parameter:
    """One parameter of a checkpoint, of which nothing is read yet."""

    path: str
    spec: ArraySpec
    reader: Reader
    source: TensorSource

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return self.spec.shape

    def read(self, index: Index | None = None) -> np.ndarray:
        """All of it, or the part at `index` (one slice an axis, of step 1), in the dtype of its spec.

        The result may be a view of the mapped file. Of a part no more is read than the reader and the tensor's
        transform need for it.
        """
        dtype, shape = np.dtype(self.spec.dtype), self.spec.shape
        if index is None:
            return _assemble(self.reader, self.source, self.spec)
        index = tuple(slice(*one.indices(size)) for one, size in zip(index, shape, strict=True))
        if len(self.source.names) == 1:
            return _slice(self.reader, self.source, 0, index, dtype)
        out = np.empty(shape_at(shape, index), dtype)
        start = 0
        for number in range(len(self.source.names)):
            length = shape_of(self.source, [self.reader.tensors[self.source.names[number]]], number)[0]
            # What the part wants of these rows, counted from the first of them.
            first, last = max(index[0].start - start, 0), min(index[0].stop - start, length)
            if first < last:
                rows = slice(start + first - index[0].start, start + last - index[0].start)
                out[rows] = _slice(self.reader, self.source, number, (slice(first, last), *index[1:]), dtype)
            start += length
        return out


Put = Callable[[Parameter], Any]


class Readable(Protocol):
    """What can be read in parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all of it."""
        ...

    def read(self, index: Index | None = None) -> np.ndarray:
        """All of it, or the part at `index`."""
        ...


def sharded(sharding_of: Callable[[Parameter], jax.sharding.Sharding]) -> Put:
    """A `put` for many devices, on this host and others: a host reads the shards of its devices, each once."""
    return lambda parameter: put_shards(parameter, sharding_of(parameter))


def put_shards(readable: Readable, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array on the devices of the sharding; this host reads what its own devices hold, each part once."""
    shards = {}

    def read(index: Index | None) -> np.ndarray:
        assert index is not None  # JAX names a part for each device
        key = tuple((one.start, one.stop) for one in index)
        if key not in shards:
            shards[key] = np.array(readable.read(index))  # a copy, as in `copy_to_device`
        return shards[key]

    return jax.block_until_ready(jax.make_array_from_callback(readable.shape, sharding, read))


def load(reader: Reader, specs: Any, table: NameTable, *, put: Put | None = None) -> Any:
    """Hands every parameter to `put`, one at a time, to be read in the dtype of its spec.

    All names and shapes are checked before the first byte of weights is read, so that a model is never half loaded.

    Args:
      reader: the open checkpoint.
      specs: nested dicts and lists of ArraySpec; a parameter's path is its keys joined by ".".
      table: where each path comes from.
      put: takes one parameter, reads what it needs of it and brings that to the device; by default all of it to the
        default device, and `sharded` makes one for many.

    Returns:
      The tree of `specs` with what `put` gave in place of each ArraySpec.

    Raises:
      WeightsError: naming every missing, unexpected and misshaped tensor.
    """
    put = put or (lambda parameter: copy_to_device(parameter.read()))
    check(reader, specs, table)
    flat = dict(flatten(specs))
    arrays = {}
    for path, spec in flat.items():
        arrays[path] = put(Parameter(path, spec, reader, table.sources[path]))
        for name in table.sources[path].names:
            reader.release(name)
    return _unflatten(specs, "", arrays)


def copy_to_device(array: np.ndarray) -> jax.Array:
    """The array on the default device, all of it there: what it was a view of may then leave memory.

    jax.device_put would share memory with aligned host arrays on CPU, mapped files included.
    """
    return jax.block_until_ready(jnp.asarray(array))


def check(reader: Reader, specs: Any, table: NameTable) -> list[str]:
    """Raises one WeightsError for everything in which checkpoint, name table and specs disagree.

    Returns:
      The tensors that the table allows to stay unread.
    """
    flat_specs = dict(flatten(specs))
    missing: list[str] = []
    misshaped: list[str] = []
    used: set[str] = set()
    for path, spec in flat_specs.items():
        source = table.sources.get(path)
        names = source.names if source else ()
        used.update(names)
        lost = [name for name in names if name not in reader.tensors]
        if lost or source is None:
            missing.append(f"{', '.join(lost) or 'no tensor is named'} (for {path} {list(spec.shape)})")
            continue
        infos = [reader.tensors[name] for name in names]
        described = " + ".join(
            f"{name} {list(info.shape)} {info.dtype}" for name, info in zip(names, infos, strict=True)
        )
        try:
            shape = shape_of(source, infos)
        except ValueError:
            shape = None
        if shape != tuple(spec.shape):
            misshaped.append(f"{described} cannot fill {path} {list(spec.shape)}")
        elif any(_kind(info.dtype) != _kind(np.dtype(spec.dtype)) for info in infos):
            misshaped.append(f"{described} cannot fill {path}, which is {np.dtype(spec.dtype)}")
    missing += [f"no parameter (for the source of {path})" for path in table.sources if path not in flat_specs]
    unused = [name for name in reader.tensors if name not in used]
    unread = {pattern: [name for name in unused if re.fullmatch(pattern, name)] for pattern in table.ignored}
    ignored = dict.fromkeys(name for names in unread.values() for name in names)
    unexpected = [f"{name} {list(reader.tensors[name].shape)}" for name in unused if name not in ignored]
    found = (("missing", missing), ("unexpected", unexpected), ("misshaped", misshaped))
    problems = [f"{kind}: {_listed(items)}" for kind, items in found if items]
    if problems:
        raise WeightsError(
            "the checkpoint does not fit the model its config describes\n  "
            + "\n  ".join(problems)
            + "\nuse a config and weights of the same model, or fetch the checkpoint again"
        )
    for pattern, names in unread.items():
        if names:
            logger.info("left unread, not part of this model: %d tensors %s (%s, ...)", len(names), pattern, names[0])
    return list(ignored)


def shape_of(source: TensorSource, infos: list[TensorInfo], first_index: int = 0) -> tuple[int, ...]:
    """The shape that transforming and joining would give, found on stand-ins of stride 0 instead of weights.

    infos: of the tensors from the first_index-th on.
    """
    shapes = []
    for index, info in enumerate(infos, first_index):
        transform = source.transform_of(index)
        stand_in = np.broadcast_to(np.zeros((), np.int8), info.shape)
        shapes.append((transform(stand_in) if transform else stand_in).shape)
    first = shapes[0]
    if len(shapes) > 1 and (not first or any(shape[1:] != first[1:] or not shape for shape in shapes)):
        raise ValueError("parts differ beyond their first axis")
    return first if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *first[1:])


def _assemble(reader: Reader, source: TensorSource, spec: ArraySpec) -> np.ndarray:
    dtype = np.dtype(spec.dtype)
    if len(source.names) == 1:
        return _part(reader, source, 0, dtype)
    out = np.empty(spec.shape, dtype)
    start = 0
    for index in range(len(source.names)):
        part = _part(reader, source, index, dtype)
        out[start : start + len(part)] = part
        start += len(part)
    return out


def _part(reader: Reader, source: TensorSource, index: int, dtype: np.dtype) -> np.ndarray:
    transform = source.transform_of(index)
    if transform is None:
        return reader.read(source.names[index], dtype)
    # A transform may do arithmetic, so it sees the file's own precision and the cast comes last.
    return np.asarray(transform(reader.read(source.names[index]))).astype(dtype, copy=False)


def _slice(reader: Reader, source: TensorSource, number: int, index: Index, dtype: np.dtype) -> np.ndarray:
    name, transform = source.names[number], source.transform_of(number)
    if transform is None:
        return reader.read(name, dtype, index)

    def fetch(wanted: Index | None) -> np.ndarray:
        return reader.read(name) if wanted is None else reader.read(name, None, wanted)

    return np.asarray(part_of(transform, fetch, index, reader.tensors[name].shape)).astype(dtype, copy=False)


def _kind(dtype: np.dtype) -> str:
    return "float" if jnp.issubdtype(dtype, jnp.floating) else "bool" if dtype == np.bool_ else "integer"


def _listed(items: list[str]) -> str:
    more = len(items) - MAX_LISTED
    return "; ".join(items[:MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")


def _children(tree: Any, prefix: str) -> Iterator[tuple[Any, str, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, child in items:
        yield key, f"{prefix}.{key}" if prefix else str(key), child


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, ArraySpec]]:
    """(path, spec) of every parameter, its keys joined by "."."""
    if isinstance(tree, ArraySpec):
        yield prefix, tree
        return
    for _, path, child in _children(tree, prefix):
        yield from flatten(child, path)


def _unflatten(tree: Any, prefix: str, arrays: dict[str, Any]) -> Any:
    if isinstance(tree, ArraySpec):
        return arrays[prefix]
    built = [(key, _unflatten(child, path, arrays)) for key, path, child in _children(tree, prefix)]
    return dict(built) if isinstance(tree, dict) else [child for _, child in built]
