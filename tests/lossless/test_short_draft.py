"""Device. T14: a drafter whose limit is shorter than the target's stops drafting there, for that request only."""

import pytest

from jaxspec import SamplingParams
from tests.lossless.engines import MAX_MODEL_LEN, VOCAB_SIZE, draft_model, make_engine
from tests.lossless.test_every_proposer import histogram_of
from tests.oracle.llama import assert_says, continuation

K, LIMIT = 3, 16


@pytest.mark.heavy
def test_past_its_limit_a_drafter_is_silent_and_its_request_goes_on(target, drafter, target_oracle, drafter_oracle):
    engine = make_engine(target, draft_model(K, drafter, max_model_len=LIMIT), max_num_seqs=5)
    prompts = [[index % VOCAB_SIZE for index in range(length)] for length in (8, 15, 16, 17, 60)]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    def guess(ids, limit):
        return continuation(drafter_oracle, ids, max(0, min(limit, LIMIT - len(ids)))).token_ids

    for prompt, output in zip(prompts, outputs, strict=True):
        answer = continuation(target_oracle, prompt, MAX_MODEL_LEN - len(prompt))
        assert_says(output.outputs[0].token_ids, answer)
        assert output.outputs[0].finish_reason == "length"
        wanted = histogram_of(K, prompt, answer.token_ids, guess)
        assert output.metrics.speculative_decoding["acceptance_histogram"] == wanted
    drafted = [output.metrics.speculative_decoding["num_draft_tokens"] > 0 for output in outputs]
    assert drafted == [True, True, False, False, False]
