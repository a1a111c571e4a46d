"""Host. Which cases of a long list the default run takes: the others run with `--heavy`, as `--all` does."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def heavy_but(cases: Iterable[Any], is_quick: Callable[[Any], bool]) -> list[Any]:
    """The cases as parameters, all of them marked heavy but those named quick, of which there is at least one."""
    cases = list(cases)
    assert any(is_quick(case) for case in cases), "no case is quick"
    return [case if is_quick(case) else pytest.param(case, marks=pytest.mark.heavy) for case in cases]


def heavy_but_first(cases: Iterable[tuple], key: Callable[[tuple], Any] = lambda case: None) -> list[Any]:
    """Cases of several parameters, all of them marked heavy but the first of each kind, which `key` tells."""
    kinds = set()
    marked = []
    for case in cases:
        marked.append(pytest.param(*case, marks=[pytest.mark.heavy] if key(case) in kinds else []))
        kinds.add(key(case))
    return marked
