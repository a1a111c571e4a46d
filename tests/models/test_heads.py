"""Device. Every drafter golden against its authors' code: a first pass, steps on the state fed back, drafts."""

import json

import numpy as np
import pytest

from scripts.check_golden import run_drafter
from tests.oracle.folders import DRAFTERS, TINY
from tests.oracle.goldens import assert_close


@pytest.mark.parametrize(("name", "kind"), DRAFTERS)
def test_goldens(name, kind):
    case = json.loads((TINY / name / "case.json").read_text())
    found, expected = run_drafter(TINY / name, case, kind)
    assert any(array.dtype == np.float32 for array in found.values())
    for array, ours in found.items():
        if array.endswith("tokens"):
            np.testing.assert_array_equal(ours, expected[array])
        else:
            assert_close(ours, expected[array])
