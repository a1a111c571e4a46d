"""Host. Rooms stand on floors: a room imports only from lower ones, never sideways or up, lazy imports included."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "jaxspec"

FLOORS = {
    "cli": 10,
    "serve": 9, "bench": 9, "aot": 9, "train": 9, "tools": 9,
    "engine": 8,
    "step": 7,
    "proposers": 5, "scheduler": 5,
    "models": 4,
    "sampling": 3, "cache": 3, "rejection": 3, "weights": 3,
    "pallas_kernels": 2, "distributed": 2, "metrics": 2, "text": 2,
    "config": 1, "types": 1, "keys": 1, "shards": 1,
    "errors": 0,
}  # fmt: skip

# The front door: `jaxspec/__init__.py` and `jaxspec/__main__.py` may name anything, and nothing inside may import them.
FRONT = ("__init__", "__main__")

# What stands on less than its floor would allow.
ONLY = {
    "config": {"errors"},  # model shape is data about a model, known to all and knowing none
    "pallas_kernels": {"errors", "keys", "shards"},  # arrays in, arrays out: no jaxspec type or config enters
}


def room_of(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST):
    """(line, dotted module, leading dots) of every import, lazy ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from ((node.lineno, f"{module}.{alias.name}".strip("."), node.level) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value, 0


def faults(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        room = room_of(path, package)
        if room in FRONT:
            continue
        if room not in FLOORS:
            found.append(f"{path}:1: room '{room}' stands on no floor")
            continue
        depth = len(path.relative_to(package).parts) - 1
        for line, module, level in imported_modules(ast.parse(path.read_text(encoding="utf-8"))):
            if level > depth:
                found.append(f"{path}:{line}: imports between rooms are absolute, got relative '{module}'")
                continue
            if level > 0 or module.split(".")[0] != package.name:
                continue
            target = module.split(".")[1] if "." in module else "__init__"
            if target == room:
                continue
            if target not in FLOORS:
                found.append(f"{path}:{line}: '{module}' is no room of {package.name}")
            elif FLOORS[target] >= FLOORS[room] or target not in ONLY.get(room, FLOORS):
                found.append(
                    f"{path}:{line}: {room} (floor {FLOORS[room]}) must not import {target} (floor {FLOORS[target]})"
                )
    return found


def test_rooms_import_only_from_lower_floors():
    assert faults(PACKAGE) == []


@pytest.mark.parametrize(
    ("path", "source", "says"),
    [
        ("models/llama.py", "from jaxspec.step import pack", "llama.py:1: models (floor 4) must not import step"),
        ("models/llama.py", "def f():\n    import jaxspec.engine", "llama.py:2: models (floor 4)"),
        ("models/llama.py", "def f():\n    from jaxspec import engine", "llama.py:2: models"),
        ("sampling/table.py", "from jaxspec.rejection import verify", "sampling (floor 3) must not import rejection"),
        ("sampling/table.py", "import importlib as i\ni.import_module('jaxspec.cache.pages')", "table.py:2: sampling"),
        ("sampling/table.py", "from ..cache import pages", "absolute"),
        ("sampling/deep/table.py", "from ...cache import pages", "absolute"),
        ("config/model.py", "from jaxspec.types import Drafts", "config (floor 1) must not import types"),
        ("pallas_kernels/rejection/api.py", "from jaxspec.types import Drafts", "must not import types"),
        ("engine/core.py", "import jaxspec", "'jaxspec' is no room"),
        ("engine/core.py", "from jaxspec import Engine", "'jaxspec.Engine' is no room"),
        ("attic/old.py", "", "'attic' stands on no floor"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_file_and_line(tmp_path, path, source, says):
    file = tmp_path / "jaxspec" / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    (found,) = faults(tmp_path / "jaxspec")
    assert says in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("engine/core.py", "from jaxspec.step.pack import pack\nfrom jaxspec import errors\nimport jax"),
        ("sampling/table.py", "from . import params\nfrom .params import X\nfrom jaxspec.sampling import params"),
        ("sampling/deep/table.py", "from ..params import SamplingParams"),
        ("__init__.py", "from jaxspec.engine import Engine as Engine"),
    ],
)  # fmt: skip
def test_what_is_right_is_no_fault(tmp_path, path, source):
    file = tmp_path / "jaxspec" / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert faults(tmp_path / "jaxspec") == []
