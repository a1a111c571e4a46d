"""Device. T3: a drafter equal to the target is right in every round but those it is misled in, and recovers at once."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.cache.pages import pool_shape
from jaxspec.models.registry import family_of
from jaxspec.proposers.draft_model import draft_model
from jaxspec.weights.checkpoint import open_checkpoint
from tests.lossless.engines import VOCAB_SIZE, custom, make_engine
from tests.lossless.misled import expected_histogram, wrong_every
from tests.oracle.folders import write_llama
from tests.oracle.llama import TIE, NumpyLlama

K, EVERY = 4, 7
NUM_TOKENS, MAX_LEN, PAGE_SIZE = 512, 544, 16


@pytest.mark.parametrize("num_requests", [pytest.param(1, marks=pytest.mark.heavy), 16])
def test_self_draft_is_accepted_in_full_but_where_it_was_misled(tmp_path, num_requests):
    folder = write_llama(tmp_path / "target", seed=2, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_LEN)
    with open_checkpoint(folder) as checkpoint:
        config = checkpoint.config
    num_pages = 16 * MAX_LEN // PAGE_SIZE
    proposer = draft_model(
        family_of(config.family),
        config,
        num_tokens=K,
        max_model_len=MAX_LEN,
        sample_method="greedy",
        pool_shape=pool_shape(config, num_pages, PAGE_SIZE),
        pool_dtype=jnp.float32,
    )
    engine = make_engine(
        folder,
        custom(K),
        proposer=wrong_every(EVERY, proposer, lambda weights: {"draft": weights["target"]}, VOCAB_SIZE),
        max_model_len=MAX_LEN,
        max_num_seqs=16,
        block_size=PAGE_SIZE,
        num_pages=num_pages,
    )
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, VOCAB_SIZE, 5 + index).tolist() for index in range(num_requests)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    oracle, num_clean = NumpyLlama(folder), 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = output.outputs[0].token_ids
        logits_TV = oracle.logits([prompt + ids])[0, len(prompt) - 1 : -1]
        best_T = logits_TV.max(axis=1)
        assert (logits_TV[np.arange(NUM_TOKENS), ids] > best_T - TIE).all()
        second_T = np.partition(logits_TV, -2, axis=1)[:, -2]
        if (best_T - second_T).min() > TIE:
            assert output.metrics.speculative_decoding["acceptance_histogram"] == expected_histogram(
                NUM_TOKENS, K, EVERY
            )
            num_clean += 1
    assert num_clean > num_requests // 2
