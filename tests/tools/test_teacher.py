"""Device. Teacher-forced logits are those of a model written in numpy, in every shape they are computed in."""

import numpy as np
import pytest

from jaxspec.tools.teacher import ANSWER_CHUNK, PROMPT_CHUNK, Teacher
from tests.lossless.engines import make_engine, ngram
from tests.oracle.folders import write_llama
from tests.oracle.llama import NumpyLlama

LIMIT = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("teacher") / "target", seed=6, vocab_size=24)


@pytest.fixture(scope="module")
def engines(model):
    return {exact: make_engine(model, ngram(2), exact=exact, max_model_len=LIMIT) for exact in (False, True)}


@pytest.mark.parametrize(
    ("exact", "one_by_one"), [pytest.param(False, True, marks=pytest.mark.heavy), (False, False), (True, True)]
)
def test_logits_are_the_models(model, engines, exact, one_by_one):
    rng = np.random.default_rng(0)
    # More texts than rows; prompts of one token and beyond a chunk, answers of one token and beyond a chunk.
    lengths = [(1, 3), (5, ANSWER_CHUNK + 2), (PROMPT_CHUNK + 3, 1), (PROMPT_CHUNK + 1, ANSWER_CHUNK), (2, 2)]
    texts = [(rng.integers(0, 24, n).tolist(), rng.integers(0, 24, m).tolist()) for n, m in lengths]
    parts = engines[exact].core.parts
    assert len(texts) > parts.config.max_num_seqs
    teacher = Teacher(parts, LIMIT, one_by_one=one_by_one)
    oracle = NumpyLlama(model)
    found = list(teacher.logits(texts))
    assert len(found) == len(texts)
    for (prompt, answer), logits_TV in zip(texts, found, strict=True):
        expected_TV = oracle.logits([[*prompt, *answer]])[0, len(prompt) - 1 : -1]
        np.testing.assert_allclose(logits_TV, expected_TV, atol=1e-3)
