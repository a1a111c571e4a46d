"""Host. The n-gram matcher against a search in plain Python, and what it must not look at."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.proposers.ngram import match

matched = jax.jit(match, static_argnames=("min_n", "max_n", "num_tokens", "max_model_len", "prompt_lookup_match"))


def search(context, min_n, max_n, num_tokens, max_model_len, latest=False):
    """behaviours.md 2.1, word for word."""
    num_tokens = min(num_tokens, max_model_len - len(context))
    if len(context) < min_n or num_tokens <= 0:
        return []
    for n in range(min(max_n, len(context) - 1), min_n - 1, -1):
        starts = [start for start in range(len(context) - n) if context[start : start + n] == context[-n:]]
        if starts:
            follows = (starts[-1] if latest else starts[0]) + n
            return context[follows : follows + num_tokens]
    return []


def proposals(contexts, capacity, min_n, max_n, num_tokens, max_model_len, padding=-1, **kwargs):
    history_BC = np.full((len(contexts), capacity), padding)
    for row, context in enumerate(contexts):
        history_BC[row, : len(context)] = context
    drafts = matched(
        jnp.asarray(history_BC, jnp.int32),
        jnp.asarray([len(context) for context in contexts], jnp.int32),
        min_n=min_n, max_n=max_n, num_tokens=num_tokens, max_model_len=max_model_len, **kwargs,
    )  # fmt: skip
    assert drafts.logits_BKV is None
    ids, counts = np.asarray(drafts.token_ids_BK), np.asarray(drafts.counts_B)
    assert (ids[np.arange(num_tokens)[None] >= counts[:, None]] == -1).all()
    return [row[:count].tolist() for row, count in zip(ids, counts, strict=True)]


@pytest.mark.parametrize("latest", [False, True])
@pytest.mark.parametrize(("min_n", "max_n", "num_tokens"), [(1, 1, 1), (1, 3, 4), (2, 2, 8), (2, 5, 4), (3, 9, 2)])
@pytest.mark.parametrize("max_model_len", [1000, 37])
def test_proposals_are_those_of_a_search(latest, min_n, max_n, num_tokens, max_model_len):
    rng = np.random.default_rng(max_n)
    kwargs = {"prompt_lookup_match": "latest"} if latest else {}
    for _ in range(12):
        contexts = [rng.integers(0, rng.integers(1, 5), rng.integers(0, 41)).tolist() for _ in range(16)]
        found = proposals(contexts, 40, min_n, max_n, num_tokens, max_model_len, **kwargs)
        assert found == [search(one, min_n, max_n, num_tokens, max_model_len, latest) for one in contexts]


def test_the_earliest_of_equal_matches_is_the_default():
    context = [1, 2, 7, 1, 2, 8, 1, 2]
    find = functools.partial(proposals, [context], 16, 2, 3, 2, 100)
    assert find() == [[7, 1]]
    assert find(prompt_lookup_match="latest") == [[8, 1]]


def test_a_match_may_overlap_the_suffix_but_is_not_the_suffix():
    assert proposals([[1, 1, 1], [1, 1], [1]], 8, 2, 2, 5, 100) == [[1], [], []]


@pytest.mark.parametrize("padding", [-1, 0, 3, 2**31 - 1])
def test_what_lies_past_the_length_does_not_matter(padding):
    contexts = [[3, 4, 5, 3, 4], [3, 3], [], [0, 1, 2], [4, 3]]
    assert proposals(contexts, 12, 1, 3, 4, 100, padding=padding) == [[5, 3, 4], [3], [], [], []]


def test_nothing_beyond_the_models_length():
    context = [1, 2, 3, 1, 2]
    assert [proposals([context], 8, 2, 2, 4, limit)[0] for limit in (5, 6, 7, 8, 99)] == [
        [], [3], [3, 1], [3, 1, 2], [3, 1, 2]
    ]  # fmt: skip


def test_a_full_history_in_a_long_row():
    rng = np.random.default_rng(0)
    context = rng.integers(100, 50_000, 2048).tolist()
    context[1000:1004] = context[-4:] = [7, 8, 9, 10]
    assert proposals([context, context[:1500]], 2048, 2, 4, 4, 4096) == [context[1004:1008], []]


def test_a_second_call_does_not_compile():
    proposals([[1, 2]], 8, 1, 2, 3, 50)
    before = matched._cache_size()
    proposals([[1, 1, 2, 1]], 8, 1, 2, 3, 50)
    assert matched._cache_size() == before
