"""Host. The documents stay true: rooms listed exist, names quoted exist, and no file names a place outside."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
QUOTED = re.compile(r"`(jaxspec/[\w/]+\.py)(?:::([\w.]+))?`")


def rooms_there() -> set[str]:
    names = {path.name for path in (ROOT / "jaxspec").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    return names | {path.stem for path in (ROOT / "jaxspec").glob("[!_]*.py")}


def test_structure_lists_exactly_the_rooms():
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+?)(?:\.py|/)` \|", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(rooms_there())


def test_a_request_s_life_takes_at_most_ten_lines():
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    assert 1 <= len(re.findall(r"^\d+\. ", text, flags=re.MULTILINE)) <= 10


def defined_names(path: Path) -> set[str]:
    """Names a module defines at its top, and `Class.member` for what its classes define."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for name, inner in _defines(node):
            names.add(name)
            names |= {f"{name}.{member}" for child in inner for member, _ in _defines(child)}
    return names


def _defines(node: ast.AST):
    if isinstance(node, ast.ClassDef):
        yield node.name, node.body
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name, []
    elif isinstance(node, ast.Assign):
        yield from ((target.id, []) for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, []


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_quoted_names_exist(document):
    missing = []
    for line_number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        for file, name in QUOTED.findall(line):
            path = ROOT / file
            if not path.exists() or (name and name not in defined_names(path)):
                missing.append(f"{document.name}:{line_number}: {file}::{name}")
    assert missing == []


def test_from_vllm_names_code_in_every_row():
    text = (ROOT / "docs" / "from-vllm.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| In the", "| ---"))]
    assert len(rows) >= 30
    assert [row for row in rows if not QUOTED.search(row) and "not yet" not in row] == []


def project_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so the project's files are not known")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def matches(path: Path, pattern: re.Pattern) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
    return [f"{path}:{number}: {line.strip()[:80]}" for number, line in enumerate(lines, 1) if pattern.search(line)]


def test_no_file_names_a_place_outside_the_project():
    # The words are built here so that this file does not hold them.
    outside = re.compile(r"\.\./" + r"shared\b|(?<![\w.-])/" + r"work/")
    assert [found for path in project_files() for found in matches(path, outside)] == []


def test_nothing_that_installs_names_a_host():
    host = re.compile(r"https?://|\bgit\+|--(extra-)?index-url|--find-links")
    files = [ROOT / "pyproject.toml", ROOT / ".pre-commit-config.yaml", *(ROOT / "requirements").glob("*")]
    files += [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]
    assert [found for path in files for found in matches(path, host)] == []


def test_pins_are_plain():
    pin = re.compile(r"[a-z0-9-]+==[\w.]+")
    for path in (ROOT / "requirements").glob("*.txt"):
        assert [line for line in path.read_text().splitlines() if not pin.fullmatch(line)] == []
