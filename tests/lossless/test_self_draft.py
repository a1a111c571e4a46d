"""Device. T3: a drafter equal to the target is right in every round but those it is misled in, and recovers at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jaxspec import SamplingParams
from jaxspec.cache.pages import pool_shape
from jaxspec.models.registry import family_of
from jaxspec.proposers.base import Proposer
from jaxspec.proposers.draft_model import draft_model
from jaxspec.weights.checkpoint import open_checkpoint
from tests.lossless.engines import VOCAB_SIZE, custom, make_engine
from tests.oracle.folders import write_llama
from tests.oracle.llama import TIE, NumpyLlama

K, EVERY = 4, 7
NUM_TOKENS, MAX_LEN, PAGE_SIZE = 512, 544, 16


@struct.dataclass
class Misled:
    """The draft model's own state, and how many rounds each row has had."""

    inner: object
    rounds_R: jax.Array


def wrong_every_seventh(inner: Proposer) -> Proposer:
    """The target drafts for itself; in each row's seventh round, and so on, its first guess is made another token."""

    def both(weights):
        return {"draft": weights["target"]}

    def init(num_rows):
        return Misled(inner=inner.init(num_rows), rounds_R=jnp.zeros(num_rows, jnp.int32))

    def prefill(weights, state, rows_B, tokens, hidden_BTD):
        inner_state = inner.prefill(both(weights), state.inner, rows_B, tokens, hidden_BTD)
        return Misled(inner=inner_state, rounds_R=state.rounds_R.at[rows_B].set(0))

    def propose(weights, state, view):
        drafts, inner_state = inner.propose(both(weights), state.inner, view)
        rounds_B = state.rounds_R[view.rows_B] + 1
        is_misled_B = (rounds_B % EVERY == 0) & view.is_active_B
        ids_BK = drafts.token_ids_BK
        first_B = jnp.where(is_misled_B & (ids_BK[:, 0] >= 0), (ids_BK[:, 0] + 1) % VOCAB_SIZE, ids_BK[:, 0])
        drafts = dataclasses.replace(drafts, token_ids_BK=ids_BK.at[:, 0].set(first_B))
        return drafts, Misled(inner=inner_state, rounds_R=state.rounds_R.at[view.rows_B].set(rounds_B))

    return Proposer(inner.num_tokens, init, prefill, propose)


def expected_histogram(num_tokens):
    histogram, done, rounds = [0] * (K + 1), 0, 0
    while done < num_tokens:
        rounds += 1
        drafts = min(K, num_tokens - done - 1)
        accepted = 0 if rounds % EVERY == 0 else drafts
        if drafts:
            histogram[accepted] += 1
        done += accepted + 1
    return histogram


@pytest.mark.parametrize("num_requests", [1, 16])
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
        proposer=wrong_every_seventh(proposer),
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
            assert output.metrics.speculative_decoding["acceptance_histogram"] == expected_histogram(NUM_TOKENS)
            num_clean += 1
    assert num_clean > num_requests // 2
