"""Host. Plans: who is admitted, how prompts advance, and that no page, row or request is lost on the way."""

import numpy as np
import pytest

from jaxspec.errors import CapacityError
from jaxspec.scheduler.request import SequenceState
from jaxspec.scheduler.scheduler import Scheduler


def make(max_rows=2, num_pages=8, block_size=4, max_chunk_tokens=8):
    return Scheduler(max_rows=max_rows, num_pages=num_pages, block_size=block_size, max_chunk_tokens=max_chunk_tokens)


def names(sequences):
    return [sequence.sequence_id for sequence in sequences]


def chunks(plan):
    return [(chunk.sequence.sequence_id, chunk.start, chunk.num_tokens) for chunk in plan.chunks]


def test_a_prompt_fills_the_cache_but_for_its_last_token():
    scheduler = make()
    scheduler.add(SequenceState("a", num_prompt_tokens=20, max_len=24))
    seen = []
    for _ in range(4):
        plan = scheduler.plan()
        seen.append((names(plan.admitted), chunks(plan), names(plan.decoding)))
        scheduler.audit()
    assert seen == [
        (["a"], [("a", 0, 8)], []),
        ([], [("a", 8, 8)], []),
        ([], [("a", 16, 3)], ["a"]),  # decodes in the very step that completes it
        ([], [], ["a"]),
    ]


def test_a_prompt_of_one_token_is_shown_to_the_proposer_too():
    scheduler = make()
    scheduler.add(SequenceState("a", num_prompt_tokens=1, max_len=4))
    plan = scheduler.plan()
    assert chunks(plan) == [("a", 0, 0)]
    assert names(plan.decoding) == ["a"]
    assert chunks(scheduler.plan()) == []


def test_prompts_share_a_steps_tokens_first_come_first_served():
    scheduler = make(max_rows=3, num_pages=20)
    for name, length in (("a", 6), ("b", 4), ("c", 3)):
        scheduler.add(SequenceState(name, num_prompt_tokens=length, max_len=10))
    plan = scheduler.plan()
    assert chunks(plan) == [("a", 0, 5), ("b", 0, 3)]
    assert names(plan.decoding) == ["a", "b"]
    plan = scheduler.plan()
    assert chunks(plan) == [("c", 0, 2)]
    assert names(plan.decoding) == ["a", "b", "c"]


def test_admission_waits_for_a_row_and_for_every_page():
    scheduler = make(max_rows=2, num_pages=8, block_size=4)
    for name, max_len in (("a", 20), ("b", 16), ("c", 4)):
        scheduler.add(SequenceState(name, num_prompt_tokens=2, max_len=max_len))
    plan = scheduler.plan()
    assert names(plan.admitted) == ["a"]  # b lacks a page, and c does not overtake it
    assert (scheduler.num_waiting, scheduler.num_running) == (2, 1)
    scheduler.finish(plan.admitted[0])
    assert scheduler.allocator.num_used == 0
    assert names(scheduler.plan().admitted) == ["b", "c"]


def test_what_can_never_run_is_refused_at_once():
    scheduler = make(num_pages=8, block_size=4)
    scheduler.add(SequenceState("fills the pool", num_prompt_tokens=2, max_len=32))
    with pytest.raises(CapacityError, match=r"33 tokens, 9 pages.*has 8"):
        scheduler.add(SequenceState("a", num_prompt_tokens=2, max_len=33))
    assert scheduler.num_waiting == 1


def test_finishing_works_wherever_a_sequence_stands():
    scheduler = make(max_rows=2, num_pages=16)
    waiting, prefilling, decoding = (
        SequenceState(name, num_prompt_tokens=length, max_len=24) for name, length in (("w", 2), ("p", 20), ("d", 2))
    )
    for sequence in (decoding, prefilling, waiting):
        scheduler.add(sequence)
    plan = scheduler.plan()
    assert names(plan.decoding) == ["d"]
    for sequence in (waiting, prefilling, decoding):
        assert scheduler.has_work
        scheduler.finish(sequence)
        scheduler.audit()
        scheduler.finish(sequence)  # a late second time is harmless
    assert not scheduler.has_work
    assert scheduler.allocator.num_free == 16


def test_the_audit_notices_a_row_held_twice():
    scheduler = make()
    for name in "ab":
        scheduler.add(SequenceState(name, num_prompt_tokens=2, max_len=4))
    first, second = scheduler.plan().admitted
    scheduler.audit()
    second.row = first.row
    with pytest.raises(AssertionError, match="held twice"):
        scheduler.audit()


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_random_schedules_conserve_pages_and_lose_nobody(block_size):
    """T12: arrivals, aborts and ends at any time. Every prompt is prefilled once, in order, all but its last token."""
    rng = np.random.default_rng(block_size)
    scheduler = make(max_rows=3, num_pages=96 // block_size, block_size=block_size, max_chunk_tokens=8)
    alive, prefilled, finished, num_added = {}, {}, [], 0
    for step in range(400):
        if step < 350 and rng.random() < 0.4:
            num_prompt = int(rng.integers(1, 40))
            sequence = SequenceState(str(num_added), num_prompt, num_prompt + int(rng.integers(1, 50)))
            scheduler.add(sequence)
            alive[sequence.sequence_id], prefilled[sequence.sequence_id], num_added = sequence, 0, num_added + 1
        plan = scheduler.plan()
        for sequence in plan.admitted:
            assert len(sequence.pages) * block_size >= sequence.max_len > (len(sequence.pages) - 1) * block_size
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= 8
        for chunk in plan.chunks:
            assert chunk.start == prefilled[chunk.sequence.sequence_id]
            prefilled[chunk.sequence.sequence_id] += chunk.num_tokens
        for sequence in plan.decoding:
            assert prefilled[sequence.sequence_id] == sequence.num_prompt_tokens - 1
        assert len({sequence.row for sequence in plan.decoding}) == len(plan.decoding) <= 3
        scheduler.audit()
        running = [s for s in alive.values() if s.row >= 0]
        assert scheduler.allocator.num_used == sum(len(s.pages) for s in running)
        assert (scheduler.num_running, scheduler.num_waiting) == (len(running), len(alive) - len(running))
        leaving = [s for s in plan.decoding if rng.random() < (0.2 if step < 350 else 1.0)]
        if alive and rng.random() < 0.1:
            leaving.append(alive[rng.choice(list(alive))])
        for sequence in leaving:
            scheduler.finish(sequence)
            scheduler.audit()
            if alive.pop(sequence.sequence_id, None):
                finished.append(sequence.sequence_id)
    while alive:
        for sequence in (plan := scheduler.plan()).decoding:
            scheduler.finish(sequence)
            finished.append(alive.pop(sequence.sequence_id).sequence_id)
        assert plan.chunks or plan.decoding, "a plan with nothing in it would wait for ever"
    assert sorted(finished, key=int) == [str(index) for index in range(num_added)]
    assert num_added > 100
    assert not scheduler.has_work
    assert scheduler.allocator.num_used == 0
