"""Cutting a prompt, beside every way that it can be cut."""

import itertools

import pytest

from jaxspec.scheduler.chunks import cut_into_chunks
from jaxspec.scheduler.request import SequenceState
from jaxspec.scheduler.scheduler import Limits, Scheduler


def cheapest(num_tokens, sizes, call_tokens):
    """Of all multisets of sizes that hold the tokens."""
    most = -(-num_tokens // sizes[0]) or 1
    return min(
        sum(sizes_of) + call_tokens * n
        for n in range(1, most + 1)
        for sizes_of in itertools.combinations_with_replacement(sizes, n)
        if sum(sizes_of) >= num_tokens
    )


@pytest.mark.parametrize("call_tokens", [0, 1, 3, 16, 1000])
@pytest.mark.parametrize("sizes", [(8,), (2, 8), (3, 5, 8), (2, 4, 8, 13), (8, 23)])
def test_cuts_cost_the_least(sizes, call_tokens):
    for num_tokens in range(sizes[-1] + 1):
        calls = cut_into_chunks(num_tokens, sizes, call_tokens)
        assert sum(calls) == num_tokens
        padded = [min(size for size in sizes if size >= call) for call in calls]
        assert sum(padded) + call_tokens * len(calls) == cheapest(num_tokens, sizes, call_tokens)
        assert list(padded) == sorted(padded, reverse=True)


def test_a_prompt_is_cut_within_a_step():
    """Its chunks follow each other; the last completes it; what a step may run is not exceeded."""
    scheduler = Scheduler(
        Limits(max_rows=2, num_pages=9, block_size=16, max_chunk_tokens=64, chunk_tokens=(4, 16, 64), call_tokens=2)
    )
    scheduler.add(SequenceState("a", list(range(22)), 30))
    scheduler.add(SequenceState("b", list(range(60)), 62))
    chunks = scheduler.plan().chunks
    assert [(one.sequence.sequence_id, one.start, one.num_tokens, one.is_last) for one in chunks] == [
        ("a", 0, 16, False),
        ("a", 16, 4, False),
        ("a", 20, 1, True),
        ("b", 0, 16, False),
        ("b", 16, 16, False),
        ("b", 32, 11, False),
    ]
    assert [(one.start, one.num_tokens, one.is_last) for one in scheduler.plan().chunks] == [(43, 16, True)]


def test_a_step_of_many_tokens_is_cut_too():
    """However many sizes of the smallest it holds."""
    sizes = (16, 64, 256, 1024, 4096, 16384, 32768)
    for num_tokens in (32768, 32767, 20000, 7201):
        assert sum(cut_into_chunks(num_tokens, sizes, 256)) == num_tokens
    assert cut_into_chunks(32767, sizes, 256) == (32767,)
