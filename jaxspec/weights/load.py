"""Host. Fills a model's parameters from a checkpoint, strictly: all of them, exactly, and nothing left over."""

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import WeightsError
from jaxspec.types import ArraySpec
from jaxspec.weights.names import NameTable, TensorSource
from jaxspec.weights.reader import Reader, TensorInfo

logger = logging.getLogger(__name__)

Put = Callable[[np.ndarray, str], Any]
MAX_LISTED = 40  # problems of one kind spelled out; a wrong checkpoint has thousands


def load(reader: Reader, specs: Any, table: NameTable, *, put: Put | None = None) -> Any:
    """Reads every parameter, casts it to its spec's dtype on the host and hands it to `put`, one at a time.

    All names and shapes are checked before the first byte of weights is read, so that a model is never half loaded.

    Args:
      reader: the open checkpoint.
      specs: nested dicts and lists of ArraySpec; a parameter's path is its keys joined by ".".
      table: where each path comes from.
      put: takes one array and its path and brings it to the device (default: the default device).

    Returns:
      The tree of `specs` with what `put` gave in place of each ArraySpec.

    Raises:
      WeightsError: naming every missing, unexpected and misshaped tensor.
    """
    put = put or (lambda array, _: copy_to_device(array))
    check(reader, specs, table)
    flat = dict(_flatten(specs, ""))
    arrays = {}
    for path, spec in flat.items():
        arrays[path] = put(_assemble(reader, table.sources[path], spec), path)
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
    flat_specs = dict(_flatten(specs, ""))
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


def shape_of(source: TensorSource, infos: list[TensorInfo]) -> tuple[int, ...]:
    """The shape that transforming and joining would give, found on stand-ins of stride 0 instead of weights."""
    shapes = []
    for index, info in enumerate(infos):
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


def _kind(dtype: np.dtype) -> str:
    return "float" if jnp.issubdtype(dtype, jnp.floating) else "bool" if dtype == np.bool_ else "integer"


def _listed(items: list[str]) -> str:
    more = len(items) - MAX_LISTED
    return "; ".join(items[:MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")


def _children(tree: Any, prefix: str) -> Iterator[tuple[Any, str, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, child in items:
        yield key, f"{prefix}.{key}" if prefix else str(key), child


def _flatten(tree: Any, prefix: str) -> Iterator[tuple[str, ArraySpec]]:
    if isinstance(tree, ArraySpec):
        yield prefix, tree
        return
    for _, path, child in _children(tree, prefix):
        yield from _flatten(child, path)


def _unflatten(tree: Any, prefix: str, arrays: dict[str, Any]) -> Any:
    if isinstance(tree, ArraySpec):
        return arrays[prefix]
    built = [(key, _unflatten(child, path, arrays)) for key, path, child in _children(tree, prefix)]
    return dict(built) if isinstance(tree, dict) else [child for _, child in built]
