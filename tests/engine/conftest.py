"""Host. One model that speaks, for the tests of the engine's surfaces."""

import pytest

from tests.oracle.folders import add_tokenizer, write_like, write_llama
from tests.oracle.llama import NumpyLlama


@pytest.fixture(scope="session")
def spoken(tmp_path_factory):
    """A tiny Llama of 32 letters."""
    return add_tokenizer(write_llama(tmp_path_factory.mktemp("spoken") / "model", seed=4, vocab_size=32))


@pytest.fixture(scope="session")
def drafter(spoken):
    return write_like(spoken.parent / "drafter", spoken, seed=1, noise=0.2)


@pytest.fixture(scope="session")
def oracle(spoken):
    return NumpyLlama(spoken)
