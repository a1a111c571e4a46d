"""Host. For the day an accelerator is there: `./scripts/test_device.sh`. Elsewhere every test here skips."""

import jax
import pytest

from tests.device.checks import SPECS, check_kernels, check_lossless, predicted_and_measured

# B=256 with 262144 ids is 4.6 GB of logits, made by numpy: compiled ahead of time, not worth its minutes here.
KERNELS = [name for name in SPECS if "large_batch" not in name]


@pytest.fixture(autouse=True)
def platform():
    platform = jax.default_backend()
    if platform == "cpu":
        pytest.skip("there is no accelerator, or JAXSPEC_TEST_DEVICE=1 is not set (./scripts/test_device.sh sets it)")
    return platform


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_give_the_integers_of_the_plain_form(name, platform):
    check_kernels(SPECS[name], platform)


def test_speculation_changes_no_token(tmp_path):
    check_lossless(tmp_path)


@pytest.mark.parametrize("name", ["llama3", "llama3_penalised"])
def test_memory_is_what_was_predicted(name):
    predicted, measured = predicted_and_measured(name)
    assert measured is not None
    # The device's count holds the arguments' making and its own rounding; what would matter is an [N, V] array more.
    assert predicted <= measured * 1.05
    assert measured <= predicted * 1.05 + SPECS[name].vocab_size * 4 * 32
