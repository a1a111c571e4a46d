"""Host. Compiled programs kept on disk, so that a second start neither traces nor compiles.

JAX's own cache is looked up by the traced program, and tracing is most of a warm start. This one is looked up by what
the program is made from: the code of this package, the versions below it, the configs and the shapes.
"""

import hashlib
import logging
import os
import pickle
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

logger = logging.getLogger(__name__)

_MOST_SETS = 8  # engines whose programs are kept; the least recently started go first
_ARGUMENTS, _UNFINISHED = "arguments", "unfinished-"  # in a set, what is no program
_PACKAGE = Path(__file__).resolve().parents[1]


class ExecutableStore:
    """The programs of one kind of engine, a file each.

    A file holds machine code: whoever can write to the folder can run code here, as with JAX's own cache.
    """

    def __init__(self, folder: Path, facts: Any):
        """Begins to read what is there, in the background.

        Args:
            folder: of all the sets; made when something is saved.
            facts: its `repr` tells everything about an engine that shapes its programs.
        """
        digest = hashlib.sha256(repr((facts, _surroundings())).encode())
        digest.update(_source_digest())
        self._folder = folder / digest.hexdigest()[:32]
        self._readers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="executables")
        self._found = {path.name: self._readers.submit(_read, path) for path in _largest_first(self._folder)}

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
        self._write(_ARGUMENTS, text.encode())

    def load(self, name: str) -> Any | None:
        """The program saved under this name, handed over once; None where there is none, or none that can be read."""
        found = self._found.pop(name, None)
        return found.result() if found is not None else None

    def save(self, name: str, program: Any) -> None:
        """Keep a program. One that cannot be kept is compiled again the next time."""
        try:
            device_ids = [device.id for device in program.runtime_executable().local_devices()]
            content = pickle.dumps((device_ids, *serialize_executable.serialize(program)))
        except (ValueError, NotImplementedError, pickle.PicklingError) as error:
            logger.warning("compiled program %s cannot be kept (%s: %s)", name, type(error).__name__, error)
        else:
            self._write(name, content)

    def close(self) -> None:
        """Nothing more is asked for: mark this set as used now, and drop those that were used longest ago."""
        self._readers.shutdown(wait=False, cancel_futures=True)
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


def _read(path: Path) -> Any | None:
    try:
        device_ids, payload, in_tree, out_tree = pickle.loads(path.read_bytes())
        devices = {device.id: device for device in jax.local_devices()}
        return serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, execution_devices=[devices[number] for number in device_ids]
        )
    except Exception as error:  # whatever pickle and XLA raise over bytes that they cannot read
        logger.warning("compiled program %s cannot be read (%s: %s); compiling it", path, type(error).__name__, error)
        return None


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
