"""Host. Kernels and whole rounds compile for TPU v5e and v6e."""

import pytest

from tests.aot import judging

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module", params=["v5e", "v6e"])
def outcomes(request):
    return judging.outcomes(request.param)


def test_everything_compiles(outcomes):
    judging.check_compiled(outcomes)


@pytest.mark.parametrize("outcomes", ["v5e"], indirect=True)
def test_the_kernels_need_no_room_for_the_vocabulary(outcomes):
    judging.check_memory(outcomes)


@pytest.mark.parametrize("outcomes", ["v5e"], indirect=True)
def test_every_family_compiles(outcomes):
    judging.check_families(outcomes)
