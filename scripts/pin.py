"""Host. Writes requirements/*.txt: pyproject's dependencies and all they need, at the versions of this environment.

Run it in an environment whose versions are the wanted ones: `python scripts/pin.py`.
"""

import tomllib
from importlib.metadata import requires
from importlib.metadata import version as installed_version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LISTS = {"run": (), "test": ("test",), "dev": ("test", "dev")}


def closure(roots: list[str]) -> dict[str, str]:
    """Canonical name -> installed version of every package that the roots need here."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    pending = [(Requirement(root), "") for root in roots]
    while pending:
        requirement, extra = pending.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        found[name] = installed_version(name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                pending += [(Requirement(needed), wanted) for needed in requires(name) or []]
    return found


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, extras in LISTS.items():
        roots = project["dependencies"] + [r for extra in extras for r in project["optional-dependencies"][extra]]
        pins = closure(roots)
        lines = [f"{package}=={pins[package]}\n" for package in sorted(pins)]
        (ROOT / "requirements" / f"{name}.txt").write_text("".join(lines), encoding="utf-8")
        print(f"requirements/{name}.txt: {len(pins)} packages")


if __name__ == "__main__":
    main()
