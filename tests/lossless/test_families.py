"""Device. Every family behind the engine: with n-grams, the greedy text that transformers recorded without a cache."""

import pytest

from jaxspec import SamplingParams
from tests.contracts.members import FAMILY_MEMBERS
from tests.lossless.engines import make_engine, ngram
from tests.oracle.folders import TINY
from tests.oracle.goldens import read_golden

K = 3
# One of each kind of layer and cache; the others differ from them in a matrix or a number, and cost a compilation each.
QUICK = ("mistral-swa", "gemma3-text", "gpt2", "qwen3-moe", "deepseek-v3-mtp")
MEMBERS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.heavy) for name in FAMILY_MEMBERS]


@pytest.mark.parametrize("name", MEMBERS)
def test_speculation_says_what_plain_decoding_says(name):
    """The prompt comes in by chunks that split it; the texts are longer than any window that acts in them."""
    expected = read_golden(name)
    engine = make_engine(
        TINY / name,
        ngram(K),
        max_model_len=40,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        num_pages=20,
        enable_structured_outputs=False,
    )
    params = SamplingParams(temperature=0, max_tokens=len(expected["greedy_tokens"]), ignore_eos=True)
    prompts = [{"prompt_token_ids": expected["input_ids"][0].tolist()}] * 2
    outputs = engine.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        assert list(output.outputs[0].token_ids) == expected["greedy_tokens"].tolist()
        histogram = output.metrics.speculative_decoding["acceptance_histogram"]
        assert sum(histogram) > 0, "no round drafted: the run shows nothing"
