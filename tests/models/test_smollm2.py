"""Device. SmolLM2 itself, from its GGUF file: the bare forward pass says what PyTorch said, in float32."""

import numpy as np

from tests.models.paging import Pager
from tests.oracle.smollm2 import assert_greedy


def test_the_bare_forward_agrees_with_pytorch(smollm2_path, smollm2_cases):
    """All prompts in one batch, the recorded answers fed behind them, judged where each answer was chosen."""
    pager = Pager(smollm2_path, num_rows=len(smollm2_cases), max_len=400, page_size=16, quick=False)
    rows = [case["prompt_token_ids"] + case["token_ids"][:-1] for case in smollm2_cases]
    choosing = [slice(len(case["prompt_token_ids"]) - 1, None) for case in smollm2_cases]
    for case, (_, logits_TV) in zip(smollm2_cases, pager.feed(rows, keep=choosing), strict=True):
        second_T, first_T = np.sort(np.partition(logits_TV, -2, axis=1)[:, -2:], axis=1).T
        assert_greedy(case, logits_TV.argmax(axis=1).tolist())
        # The lead over the runner-up, as PyTorch had it; the logits themselves are around 20.
        np.testing.assert_allclose(first_T - second_T, case["gaps"], atol=5e-3)
