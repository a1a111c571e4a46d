"""Host. The golden folders' recorded arrays, and how near to them a float32 run must come."""

import numpy as np

from tests.oracle.folders import TINY

TOLERANCE = 2e-5  # of the largest expected value


def read_golden(name: str) -> dict[str, np.ndarray]:
    with np.load(TINY / name / "expected.npz") as arrays:
        return dict(arrays)


def assert_close(found, expected, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())
