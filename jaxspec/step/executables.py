"""Host. Compiled programs kept on disk, so that a second start neither traces nor compiles.

JAX's own cache is looked up by the traced program, and tracing is most of a warm start. This one is looked up by what
the program is made from: the code of this package, the versions below it, the configs and the shapes.

Making a program of its file takes XLA seconds. Those that a first request needs are made at once, the others behind
the start, one after the other.
"""

import functools
import hashlib
import logging
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

logger = logging.getLogger(__name__)

_MOST_SETS = 8  # engines whose programs are kept; the least recently started go first
_ARGUMENTS, _UNFINISHED = "arguments", "unfinished-"  # in a set, what is no program
_DIGEST_SIZE = hashlib.sha256().digest_size
_PACKAGE = Path(__file__).resolve().parents[1]


class KeptProgram:
    """A program from the store; whoever calls it before it is made waits. One that XLA cannot make of its file, though
    all of that is there, is compiled when it is called."""

    def __init__(self, making: Future[Any], temp_bytes: int):
        self._making, self.temp_bytes = making, temp_bytes
        self.compile: Callable[[], Any] | None = None  # set by who knows how

    @functools.cached_property
    def program(self) -> Any:
        try:
            return self._making.result()
        except Exception as error:  # whatever XLA raises
            if self.compile is None:
                raise
            logger.warning("a kept program cannot be made (%s: %s); compiling it", type(error).__name__, error)
            return self.compile()

    def __call__(self, *args: Any) -> Any:
        return self.program(*args)


class _Content(NamedTuple):
    """Of a file."""

    temp_bytes: int
    device_ids: list[int]
    payload: bytes
    in_tree: Any
    out_tree: Any


class ExecutableStore:
    """The programs of one kind of engine, a file each.

    A file holds machine code: whoever can write to the folder can run code here, as with JAX's own cache.
    """

    def __init__(self, folder: Path, facts: Any, is_first: Callable[[str], bool] = lambda name: True):
        """Begins to read what is there, in the background.

        Args:
            folder: of all the sets; made when something is saved.
            facts: its `repr` tells everything about an engine that shapes its programs.
            is_first: whether the program of this name is made at once, or behind the start.
        """
        digest = hashlib.sha256(repr((facts, _surroundings())).encode())
        digest.update(_source_digest())
        self._folder = folder / digest.hexdigest()[:32]
        self._readers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="executables")
        read = {path.name: self._readers.submit(_read, path) for path in _largest_first(self._folder)}
        self._found = {
            name: (content, self._readers.submit(_make, content) if is_first(name) else Future())
            for name, content in read.items()
        }
        self._behind = [(content, making) for name, (content, making) in self._found.items() if not is_first(name)]

    def settle(self, arguments: Any) -> None:
        """Say what the programs' large arguments have turned out to be; programs for others are of no use.

        Args:
            arguments: a tree of arrays, looked at for its structure, shapes and dtypes.
        """
        leaves, tree = jax.tree.flatten(arguments)
        kinds = [(tuple(leaf.shape), leaf.dtype.name) for leaf in leaves]
        text = repr((str(tree), kinds))
        try:
            known = (self._folder / _ARGUMENTS).read_text(encoding="utf-8")
        except OSError:  # nothing was saved yet
            known = None
        if known == text:
            return
        if known is not None:
            logger.warning("the compiled programs in %s are for other arrays; compiling anew", self._folder)
        self._found.clear()
        self._behind.clear()
        self._write(_ARGUMENTS, text.encode())

    def load(self, name: str) -> KeptProgram | None:
        """The program saved under this name, handed over once; None where there is none, or none that can be read."""
        found = self._found.pop(name, None)
        content = found[0].result() if found is not None else None
        return None if found is None or content is None else KeptProgram(found[1], content.temp_bytes)

    def save(self, name: str, program: Any) -> None:
        """Keep a program. One that cannot be kept is compiled again the next time."""
        try:
            device_ids = [device.id for device in program.runtime_executable().local_devices()]
            content = _Content(temp_bytes(program), device_ids, *serialize_executable.serialize(program))
            stored = pickle.dumps(tuple(content))
        except (ValueError, NotImplementedError, pickle.PicklingError) as error:
            logger.warning("compiled program %s cannot be kept (%s: %s)", name, type(error).__name__, error)
        else:
            self._write(name, hashlib.sha256(stored).digest() + stored)

    def close(self) -> None:
        """Nothing more is asked for: make the programs that are left, mark this set as used now, and drop those that
        were used longest ago."""
        for _, making in self._found.values():
            making.cancel()
        self._readers.shutdown(wait=False)
        with_one_core = ThreadPoolExecutor(max_workers=1, thread_name_prefix="executables-behind")
        for content, making in self._behind:
            with_one_core.submit(_make_into, making, content)
        with_one_core.shutdown(wait=False)
        try:
            os.utime(self._folder)
            sets = sorted(self._folder.parent.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
        except OSError:  # nothing was saved, or another process tidies
            return
        for folder in sets[_MOST_SETS:]:
            shutil.rmtree(folder, ignore_errors=True)

    def _write(self, name: str, content: bytes) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=_UNFINISHED, delete=False) as file:
                file.write(content)
            os.replace(file.name, self._folder / name)  # at once, for another process may be reading
        except OSError as error:
            logger.warning("%s is not kept in %s (%s)", name, self._folder, error)


def _largest_first(folder: Path) -> list[Path]:
    try:
        paths = [path for path in folder.iterdir() if path.name != _ARGUMENTS and not path.name.startswith(_UNFINISHED)]
        return sorted(paths, key=lambda path: path.stat().st_size, reverse=True)
    except OSError:  # nothing was saved yet, or another process tidies
        return []


def temp_bytes(program: Any) -> int:
    """Scratch memory that a compiled program needs."""
    analysis = program.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)


def _read(path: Path) -> _Content | None:
    try:
        stored = path.read_bytes()
        if hashlib.sha256(stored[_DIGEST_SIZE:]).digest() != stored[:_DIGEST_SIZE]:
            raise ValueError("it is damaged")
        return _Content(*pickle.loads(stored[_DIGEST_SIZE:]))
    except Exception as error:  # whatever pickle raises over bytes that it cannot read
        logger.warning("compiled program %s cannot be read (%s: %s); compiling it", path, type(error).__name__, error)
        return None


def _make(read: Future[_Content | None]) -> Any | None:
    content = read.result()
    if content is None or not threading.main_thread().is_alive():  # at the process's end nobody waits for it
        return None
    devices = {device.id: device for device in jax.local_devices()}
    return serialize_executable.deserialize_and_load(
        content.payload,
        content.in_tree,
        content.out_tree,
        execution_devices=[devices[number] for number in content.device_ids],
    )


def _make_into(making: Future[Any], read: Future[_Content | None]) -> None:
    if making.set_running_or_notify_cancel():
        try:
            making.set_result(_make(read))
        except Exception as error:  # for who waits
            making.set_exception(error)


def _surroundings() -> tuple[Any, ...]:
    """What else decides what a traced program is and where its machine code runs. The folder is one CPU kind's."""
    devices = jax.devices()
    caches = ("jax_compilation_cache", "jax_persistent_cache")
    settings = sorted((name, value) for name, value in jax.config.values.items() if not name.startswith(caches))
    return (
        [version(package) for package in ("jax", "jaxlib", "flax", "numpy")],
        [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        settings,
        [(device.id, device.platform, device.device_kind) for device in devices],
        devices[0].client.platform_version,
    )


def _source_digest() -> bytes:
    """Of this package's code."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return digest.digest()
