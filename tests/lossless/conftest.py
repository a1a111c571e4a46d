"""Host. The models of the lossless tests: a target, and a drafter that is often right."""

import pytest

from tests.lossless.engines import VOCAB_SIZE
from tests.oracle.folders import write_like, write_llama
from tests.oracle.llama import NumpyLlama


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("models") / "target", seed=4, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session")
def drafter(target):
    return write_like(target.parent / "drafter", target, seed=1, noise=0.2)


@pytest.fixture(scope="session")
def target_oracle(target):
    return NumpyLlama(target)


@pytest.fixture(scope="session")
def drafter_oracle(drafter):
    return NumpyLlama(drafter)
