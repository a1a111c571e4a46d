"""Device. Edits of logits against one token id at a time in numpy, with tables at their edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import RequestError
from jaxspec.pallas_kernels.rejection.penalties import SEEN_IN_PROMPT
from jaxspec.sampling.counts import token_counts
from jaxspec.sampling.edit_table import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    check_leaves_a_token,
    edit_row,
    pack_mask,
)
from jaxspec.sampling.edits import edit
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors import TokenContext
from tests.oracle.edits import edited

V, C, K = 70, 24, 3

ROWS = [
    ({}, []),
    ({"logit_bias": {0: 1.5, V - 1: -100.0, 33: 7.0}}, []),
    ({"allowed_token_ids": [0, 31, 32, 63, 64, V - 1]}, []),
    ({}, [[5], [6, 7], [8, 9, 5], list(range(10, 10 + MAX_BAD_WORD_TOKENS))]),
    ({"min_tokens": 8}, []),
    ({"min_tokens": 5, "logit_bias": {4: 2.0, 5: 9.0}, "allowed_token_ids": list(range(3, 40))}, [[5], [8, 9, 6]]),
]
STOPS = [4, 64]


def run(logits_BJV, rows, histories, prompt_lens, drafts, mask_BJU=None, stop_ids=STOPS):
    params = [SamplingParams(**more) for more, _ in rows]
    table = [edit_row(one, ids, V) for one, (_, ids) in zip(params, rows, strict=True)]
    table = jax.tree.map(lambda *columns: jnp.asarray(np.stack(columns)), *table)
    history_BC = np.full((len(rows), C), 5)  # past the end: a forbidden token, which must not be read
    draft_ids_BK = np.full((len(rows), K), -1)
    for b, (history, draft) in enumerate(zip(histories, drafts, strict=True)):
        history_BC[b, : len(history)] = history
        draft_ids_BK[b, : len(draft)] = draft
    lens = np.array([len(history) for history in histories])
    context = TokenContext(
        history_BC=jnp.asarray(history_BC, jnp.int32),
        prompt_len_B=jnp.asarray(prompt_lens, jnp.int32),
        len_B=jnp.asarray(lens, jnp.int32),
        draft_ids_BK=jnp.asarray(draft_ids_BK, jnp.int32),
    )
    stop_ids_BW = np.full((len(rows), 6), -1)
    stop_ids_BW[:, : len(stop_ids)] = stop_ids
    min_len_B = np.array(prompt_lens) + [one.min_tokens for one in params]
    return np.asarray(
        jax.jit(edit)(
            jnp.asarray(logits_BJV, jnp.float32),
            table,
            context,
            stop_ids_BW=jnp.asarray(stop_ids_BW, jnp.int32),
            min_len_B=jnp.asarray(min_len_B, jnp.int32),
            mask_BJU=mask_BJU,
        )
    )


@pytest.mark.parametrize("seed", range(4))
def test_edits_are_those_of_the_naive_loop(seed):
    rng = np.random.default_rng(seed)
    logits_BJV = rng.normal(size=(len(ROWS), K + 1, V))
    # Texts of few different tokens, so that words really end in them; prompts that end in half a word.
    prompts = [[8, 9], [6], [8], [8, 9], [1, 6], [9, 8]]
    outputs = [rng.choice([5, 6, 7, 8, 9], size=int(rng.integers(0, 7))).tolist() for _ in ROWS]
    outputs[3] = [list(range(10, 9 + MAX_BAD_WORD_TOKENS)), [6], [8, 9], []][seed]
    drafts = [rng.choice([5, 6, 7, 8, 9], size=int(rng.integers(0, K + 1))).tolist() for _ in ROWS]
    histories = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    found = run(logits_BJV, ROWS, histories, [len(prompt) for prompt in prompts], drafts)
    for b, (more, words) in enumerate(ROWS):
        for j in range(len(drafts[b]) + 1):
            output = outputs[b] + drafts[b][:j]
            wanted = edited(
                logits_BJV[b, j], SamplingParams(**more), prompts[b], output, bad_words_ids=words, stop_ids=STOPS
            )
            np.testing.assert_allclose(found[b, j], wanted, rtol=1e-6, atol=1e-6, err_msg=f"row {b}, position {j}")


def test_a_mask_is_for_its_own_row_and_position():
    rng = np.random.default_rng(0)
    is_allowed = rng.random((2, K + 1, V)) < 0.5
    mask_BJU = np.stack([[pack_mask(np.flatnonzero(place), V) for place in row] for row in is_allowed])
    logits = rng.normal(size=(2, K + 1, V)).astype(np.float32)
    found = run(logits, [({}, [])] * 2, [[1], [2]], [1, 1], [[], [3]], mask_BJU=jnp.asarray(mask_BJU))
    np.testing.assert_array_equal(found, np.where(is_allowed, logits, -np.inf))


def test_counts_are_of_the_output_and_flag_the_prompt():
    rng = np.random.default_rng(1)
    history_BC = rng.integers(0, V, (3, C))
    prompt_len, length = [0, 4, C], [C, 15, C]
    found = token_counts(
        jnp.asarray(history_BC, jnp.int32), jnp.asarray(prompt_len, jnp.int32), jnp.asarray(length, jnp.int32), V
    )
    for b in range(3):
        prompt, output = history_BC[b, : prompt_len[b]], history_BC[b, prompt_len[b] : length[b]]
        wanted = [np.sum(output == v) + SEEN_IN_PROMPT * (v in prompt) for v in range(V)]
        assert found[b].tolist() == wanted


@pytest.mark.parametrize(
    ("params", "words", "message"),
    [
        ({"logit_bias": {V: 1.0}}, [], "logit_bias: token id 70 is outside the vocabulary"),
        ({"allowed_token_ids": [1, V]}, [], "allowed_token_ids: token id 70 is outside"),
        ({"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.5)}, [], "at most 1024 entries, got 1025"),
        ({}, [[1]] * (MAX_BAD_WORDS + 1), "bad_words must hold at most 128"),
        ({}, [[1] * (MAX_BAD_WORD_TOKENS + 1)], "at most 16 tokens a word, got 17"),
        ({"extra_args": {"x": 1}}, [], "extra_args"),
    ],
)
def test_what_the_table_does_not_hold_is_refused_by_name(params, words, message):
    size = V if "1024" not in message else 2000
    with pytest.raises(RequestError, match=message):
        edit_row(SamplingParams(**params), words, size)


def test_parameters_that_leave_no_token_are_refused():
    params = SamplingParams(allowed_token_ids=[1, 2], min_tokens=1, bad_words=["x"])
    with pytest.raises(RequestError, match="leave no token"):
        check_leaves_a_token(params, [[1]], [2, 3], V)
    check_leaves_a_token(params, [[1, 2]], [2, 3], V)
    check_leaves_a_token(SamplingParams(), [[token] for token in range(V - 1)], [0], V)
    with pytest.raises(RequestError, match="leave no token"):
        check_leaves_a_token(SamplingParams(), [[token] for token in range(V)], [], V)
