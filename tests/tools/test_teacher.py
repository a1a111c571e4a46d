"""Device. Teacher-forced logits are those of a model written in numpy, in every shape they are computed in."""

import functools

import numpy as np
import pytest

from jaxspec.tools.teacher import ANSWER_CHUNK, PROMPT_CHUNK, Teacher
from tests.lossless.engines import make_engine, ngram
from tests.oracle.folders import write_llama
from tests.oracle.llama import NumpyLlama
from tests.quick import heavy_but

LIMIT = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("teacher") / "target", seed=6, vocab_size=24)


@pytest.fixture(scope="module")
def engine_that_is(model):
    return functools.cache(lambda exact: make_engine(model, ngram(2), exact=exact, max_model_len=LIMIT))


CASES = [(False, True), (False, False), (True, True)]  # exact, one by one


@pytest.mark.parametrize("case", heavy_but(CASES, lambda case: all(case)))
def test_logits_are_the_models(model, engine_that_is, case):
    exact, one_by_one = case
    rng = np.random.default_rng(0)
    # More texts than rows; prompts of one token and beyond a chunk, answers of one token and beyond a chunk.
    lengths = [(1, 3), (5, ANSWER_CHUNK + 2), (PROMPT_CHUNK + 3, 1), (PROMPT_CHUNK + 1, ANSWER_CHUNK), (2, 2)]
    texts = [(rng.integers(0, 24, n).tolist(), rng.integers(0, 24, m).tolist()) for n, m in lengths]
    parts = engine_that_is(exact).core.parts
    assert len(texts) > parts.config.max_num_seqs
    teacher = Teacher(parts, LIMIT, one_by_one=one_by_one)
    oracle = NumpyLlama(model)
    found = list(teacher.logits(texts))
    assert len(found) == len(texts)
    for (prompt, answer), logits_TV in zip(texts, found, strict=True):
        expected_TV = oracle.logits([[*prompt, *answer]])[0, len(prompt) - 1 : -1]
        np.testing.assert_allclose(logits_TV, expected_TV, atol=1e-3)
