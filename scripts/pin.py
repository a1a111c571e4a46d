"""Host. Writes requirements/*.txt: pyproject's dependencies and all they need, at the versions of this environment.

Run it in an environment whose versions are the wanted ones: `python scripts/pin.py`, or `python scripts/pin.py aot`
for some of the lists alone. "aot" holds only what it needs beyond "run": it is installed on top.
"""

import sys
import tomllib
from importlib.metadata import requires
from importlib.metadata import version as installed_version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LISTS = {"run": (), "test": ("test",), "dev": ("test", "dev"), "aot": ("aot-tpu", "aot-gpu")}
ON_TOP = {"aot": "run"}


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


def main(names: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def pins_of(name: str) -> dict[str, str]:
        extras = [r for extra in LISTS[name] for r in project["optional-dependencies"][extra]]
        return closure(project["dependencies"] + extras)

    for name in names or LISTS:
        below = pins_of(ON_TOP[name]) if name in ON_TOP else {}
        pins = {package: version for package, version in pins_of(name).items() if package not in below}
        lines = [f"{package}=={pins[package]}\n" for package in sorted(pins)]
        (ROOT / "requirements" / f"{name}.txt").write_text("".join(lines), encoding="utf-8")
        print(f"requirements/{name}.txt: {len(pins)} packages")


if __name__ == "__main__":
    main(sys.argv[1:])
