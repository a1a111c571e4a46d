"""Host. The device checks themselves, on the CPU: kernels interpreted, so that the day's code is known to run."""

import pytest

from jaxspec.pallas_kernels.rejection.api import reject
from tests.device import checks
from tests.device.checks import SPECS, check_kernels, check_lossless, predicted_and_measured


def test_the_kernel_check_runs_and_notices(monkeypatch):
    check_kernels(SPECS["one_row"], "cpu", seeds=1)

    def wrong(*, implementation, **arguments):
        num_accepted, tokens = reject(**arguments, implementation="reference")
        return num_accepted, tokens + int(implementation == "pallas")

    monkeypatch.setattr(checks, "reject", wrong)
    with pytest.raises(AssertionError, match="token_ids_B"):
        check_kernels(SPECS["one_row"], "cpu", seeds=1)


@pytest.mark.heavy
def test_the_lossless_check_runs(tmp_path):
    check_lossless(tmp_path, num_tokens=6)


def test_the_memory_check_runs():
    predicted, measured = predicted_and_measured("v100")
    arguments = 2 * 100 * 4 + 100 * 4
    assert arguments <= predicted <= 50 * arguments
    assert measured is None, "a CPU counts no peak: this line changes when JAX does"
