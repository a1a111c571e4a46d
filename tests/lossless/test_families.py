"""Device. Every family behind the engine: the greedy text that transformers recorded without a cache, with drafts that
are looked up, and where nothing is found are the model's own (T3), which must be right."""

import json

import pytest

from jaxspec import SamplingParams
from tests.contracts.members import FAMILY_MEMBERS
from tests.lossless.engines import make_engine, ngram
from tests.lossless.test_every_proposer import copied, histogram_of
from tests.oracle.folders import TINY
from tests.oracle.goldens import read_golden
from tests.quick import heavy_but

K = 3
# One of each kind of layer and cache; the others differ from them in a matrix or a number, and cost a compilation each.
QUICK = ("deepseek-v3-mtp",)


@pytest.mark.parametrize("name", heavy_but(FAMILY_MEMBERS, QUICK.__contains__))
def test_speculation_says_what_plain_decoding_says(name):
    """The prompt comes in by chunks that split it; the texts are longer than any window that acts in them."""
    expected = read_golden(name)
    greedy = expected["greedy_tokens"].tolist()
    values = json.loads((TINY / name / "config.json").read_text())
    all_layers = {"exit_layer": values.get("num_hidden_layers") or values["n_layer"]}
    engine = make_engine(
        TINY / name,
        ngram(K, min_n=2) | {"method": "ngram+self"} | all_layers,
        max_model_len=40,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        num_pages=20,
        enable_structured_outputs=False,
    )
    params = SamplingParams(temperature=0, max_tokens=len(greedy), ignore_eos=True)
    prompt = expected["input_ids"][0].tolist()
    outputs = engine.generate([{"prompt_token_ids": prompt}] * 2, params, use_tqdm=False)
    text = prompt + greedy
    wanted = histogram_of(
        K, prompt, greedy, lambda ids, limit: copied(ids, 2, 3, limit) or text[len(ids) : len(ids) + limit]
    )
    assert wanted[K] > 0, "no round drafted by itself: the run shows nothing"
    for output in outputs:
        assert list(output.outputs[0].token_ids) == greedy
        assert output.metrics.speculative_decoding["acceptance_histogram"] == wanted
