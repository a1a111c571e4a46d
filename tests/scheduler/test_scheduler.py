"""Host. Plans: who is admitted, how prompts advance, who gives way, and that no page, row or request is lost."""

import pytest

from jaxspec.errors import CapacityError, QueueFullError
from jaxspec.scheduler.request import SequenceState
from jaxspec.scheduler.scheduler import Limits, Scheduler


def make(max_rows=2, num_pages=8, block_size=4, max_chunk_tokens=8, **more):
    return Scheduler(Limits(max_rows, num_pages, block_size, max_chunk_tokens, **more))


def sequence(name, num_prompt_tokens, max_len, **more):
    """One whose tokens are its own."""
    start = 1000 * sum(map(ord, name))
    return SequenceState(name, list(range(start, start + num_prompt_tokens)), max_len, **more)


def names(sequences):
    return [sequence.sequence_id for sequence in sequences]


def chunks(plan):
    return [(chunk.sequence.sequence_id, chunk.start, chunk.num_tokens) for chunk in plan.chunks]


def step(scheduler, num_tokens=1):
    """Run a plan in which every decoding sequence gets so many tokens; those at their end leave."""
    plan = scheduler.plan()
    for one in plan.decoding:
        scheduler.commit(one, list(range(min(num_tokens, one.max_len - len(one.token_ids)))))
        if len(one.token_ids) == one.max_len:
            scheduler.finish(one)
    scheduler.audit()
    return plan


def test_a_prompt_fills_the_cache_but_for_its_last_token():
    scheduler = make()
    scheduler.add(sequence("a", 20, 24))
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
    scheduler.add(sequence("a", 1, 4))
    plan = scheduler.plan()
    assert chunks(plan) == [("a", 0, 0)]
    assert names(plan.decoding) == ["a"]
    assert chunks(scheduler.plan()) == []


def test_prompts_share_a_steps_tokens_first_come_first_served():
    scheduler = make(max_rows=3, num_pages=20)
    for name, length in (("a", 6), ("b", 4), ("c", 3)):
        scheduler.add(sequence(name, length, 10))
    plan = scheduler.plan()
    assert chunks(plan) == [("a", 0, 5), ("b", 0, 3)]
    assert names(plan.decoding) == ["a", "b"]
    plan = scheduler.plan()
    assert chunks(plan) == [("c", 0, 2)]
    assert names(plan.decoding) == ["a", "b", "c"]


def test_a_long_prompt_stalls_nobody_for_more_than_the_budget():
    """Whoever decodes is in every plan, and no plan prefills more than its budget."""
    scheduler = make(max_rows=3, num_pages=40)
    scheduler.add(sequence("short", 2, 80))
    step(scheduler)
    for name in ("long", "longer"):
        scheduler.add(sequence(name, 60, 61))
    done = 0
    while scheduler.num_running + scheduler.num_waiting > 1:
        plan = step(scheduler)
        assert "short" in names(plan.decoding)
        assert sum(size for _, _, size in chunks(plan)) <= 8
        done += sum(size for _, _, size in chunks(plan))
    assert done == 2 * 59


def test_pages_are_taken_as_they_are_needed():
    scheduler = make(max_rows=2, num_pages=30, tokens_per_round=3)
    one = sequence("a", 6, 40)
    scheduler.add(one)
    for num_tokens in (3, 1, 3, 3):
        scheduler.plan()
        # A round writes up to two drafts behind the last token, whose own entry is the round's first.
        assert len(one.pages) == -(-(len(one.token_ids) + 2) // 4)
        scheduler.commit(one, [0] * num_tokens)


def test_nobody_takes_pages_beyond_its_end():
    scheduler = make(max_rows=1, num_pages=3, tokens_per_round=9)
    one = sequence("a", 10, 12)
    scheduler.add(one)
    step(scheduler)
    step(scheduler)
    assert len(one.pages) == 3


def test_as_many_rounds_as_there_are_pages_for():
    scheduler = make(max_rows=2, num_pages=8, tokens_per_round=4, max_rounds=8)
    a = sequence("a", 3, 32)
    scheduler.add(a)
    assert scheduler.plan().num_rounds == 8  # to its end
    assert len(a.pages) == 8
    scheduler = make(max_rows=2, num_pages=6, tokens_per_round=4, max_rounds=8)
    for name in "ab":
        scheduler.add(sequence(name, 3, 24))
    assert scheduler.plan().num_rounds == 2  # each may have 10 tokens written, in three pages
    scheduler.add(sequence("c", 3, 5))
    assert scheduler.plan().num_rounds == 1  # it waits for a row


def test_the_last_to_come_gives_way_and_goes_on_in_its_place():
    scheduler = make(max_rows=3, num_pages=6, block_size=4)
    for name in "abc":
        scheduler.add(sequence(name, 7, 16))
    plan = step(scheduler)
    assert names(plan.decoding) == ["a"]
    plan = step(scheduler)
    assert names(plan.decoding) == ["a", "b"]  # a page is spared for each of them: c would soon have to pay
    seen, order = [], []
    for _ in range(40):
        plan = step(scheduler)
        seen += names(plan.preempted)
        order += names(plan.admitted)
        if not scheduler.has_work:
            break
    assert seen[0] == "b"
    assert "a" not in seen
    assert order[-1] == "c"
    assert set(order) == {"b", "c"}
    assert not scheduler.has_work
    assert scheduler.allocator.num_used == 0


def test_a_resumed_sequence_is_prefilled_with_its_answer():
    scheduler = make(max_rows=2, num_pages=20, max_chunk_tokens=64, lookahead=0)
    one = sequence("a", 6, 40)
    scheduler.add(one)
    for _ in range(5):
        step(scheduler, 2)
    scheduler.preempt_all()
    scheduler.audit()
    assert (one.row, one.pages, scheduler.num_waiting) == (-1, [], 1)
    assert chunks(scheduler.plan()) == [("a", 0, 15)]
    scheduler.preempt(one)
    scheduler.audit()
    assert chunks(scheduler.plan()) == [("a", 14, 1)]  # its pages had names again, the unfinished one too


def test_priorities_come_first_and_pay_last():
    scheduler = make(max_rows=2, num_pages=8, is_by_priority=True)
    for name, priority in (("a", 1), ("b", 5), ("c", 1), ("d", -3)):
        scheduler.add(sequence(name, 2, 24, priority=priority))
    assert names(scheduler.plan().decoding) == ["d", "a"]
    paid = []
    while scheduler.has_work:
        paid += names(step(scheduler).preempted)
    assert paid[0] == "a"
    assert "d" not in paid


def test_priorities_mean_nothing_to_first_come_first_served():
    scheduler = make(max_rows=1)
    for name, priority in (("a", 1), ("b", -5)):
        scheduler.add(sequence(name, 2, 8, priority=priority))
    assert names(scheduler.plan().decoding) == ["a"]


def test_the_queue_has_an_end():
    scheduler = make(max_rows=2, max_queued=1)
    for name in "abc":  # two of them have a row waiting for them
        scheduler.add(sequence(name, 2, 4))
    with pytest.raises(QueueFullError, match="max_queued_requests=1"):
        scheduler.add(sequence("d", 2, 4))
    assert scheduler.num_waiting == 3
    step(scheduler)
    with pytest.raises(QueueFullError):
        scheduler.add(sequence("d", 2, 4))
    while scheduler.num_running == 2:
        step(scheduler)
    step(scheduler)
    scheduler.add(sequence("d", 2, 4))


def test_an_exact_engine_takes_every_page_at_once_and_nobody_pays():
    scheduler = make(max_rows=2, num_pages=8, block_size=4, is_exact=True, lookahead=0)
    for name, max_len in (("a", 20), ("b", 16), ("c", 4)):
        scheduler.add(sequence(name, 2, max_len))
    plan = scheduler.plan()
    assert names(plan.admitted) == ["a"]  # b lacks a page, and c does not overtake it
    assert (scheduler.num_waiting, scheduler.num_running) == (2, 1)
    scheduler.finish(plan.admitted[0])
    assert scheduler.allocator.num_used == 0
    assert names(scheduler.plan().admitted) == ["b", "c"]


def test_an_exact_engine_shares_prompts_alone():
    """What decode rounds wrote is not bit for bit what a prefill writes."""
    for is_exact, start in ((True, 8), (False, 18)):
        scheduler = make(num_pages=20, max_chunk_tokens=64, is_exact=is_exact, lookahead=0)
        first = sequence("a", 12, 20)
        scheduler.add(first)
        while scheduler.has_work:
            step(scheduler)
        scheduler.add(SequenceState("b", [*first.token_ids, 7], 30))
        assert chunks(scheduler.plan()) == [("b", start, 20 - start)]


def test_what_can_never_run_is_refused_at_once():
    scheduler = make(num_pages=8, block_size=4)
    scheduler.add(sequence("fills the pool", 2, 32))
    with pytest.raises(CapacityError, match=r"33 tokens, 9 pages.*has 8"):
        scheduler.add(sequence("a", 2, 33))
    assert scheduler.num_waiting == 1


def test_finishing_works_wherever_a_sequence_stands():
    scheduler = make(max_rows=2, num_pages=16)
    waiting, prefilling, decoding = (sequence(name, length, 24) for name, length in (("w", 2), ("p", 20), ("d", 2)))
    for one in (decoding, prefilling, waiting):
        scheduler.add(one)
    plan = scheduler.plan()
    assert names(plan.decoding) == ["d"]
    for one in (waiting, prefilling, decoding):
        assert scheduler.has_work
        scheduler.finish(one)
        scheduler.audit()
        scheduler.finish(one)  # a late second time is harmless
    assert not scheduler.has_work
    assert scheduler.allocator.num_free == 16


def test_the_audit_notices_a_row_held_twice():
    scheduler = make()
    for name in "ab":
        scheduler.add(sequence(name, 2, 4))
    first, second = scheduler.plan().admitted
    scheduler.audit()
    second.row = first.row
    with pytest.raises(AssertionError, match="held twice"):
        scheduler.audit()


def shared(num_shared, num_own, name):
    return SequenceState(name, [*range(num_shared), *range(100 * ord(name), 100 * ord(name) + num_own)], 64)


def test_a_second_request_prefills_what_is_its_own():
    scheduler = make(max_rows=4, num_pages=40, max_chunk_tokens=64, lookahead=0)
    scheduler.add(shared(18, 4, "a"))
    scheduler.add(shared(18, 5, "b"))  # in the same step: chunks run in order
    plan = scheduler.plan()
    assert chunks(plan) == [("a", 0, 21), ("b", 16, 6)]
    a, b = plan.decoding
    assert a.pages[:4] == b.pages[:4]
    assert not set(a.pages[4:]) & set(b.pages[4:])
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 16)
    scheduler.audit()
    scheduler.finish(a)
    scheduler.audit()
    scheduler.add(shared(18, 4, "a"))
    assert chunks(scheduler.plan()) == [("a", 20, 1)]


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_something_is_always_left_to_prefill(lookahead):
    """A state for the drafter to begin with: one token, or as many as it looks ahead."""
    for length in range(13, 18):
        scheduler = make(max_rows=4, num_pages=40, max_chunk_tokens=64, lookahead=lookahead)
        scheduler.add(shared(40, 0, "a"))
        scheduler.plan()
        for start in ((length - 1 - max(1, lookahead)) // 4 * 4, length - 1 - max(1, lookahead)):
            scheduler.add(one := shared(length, 0, "b"))
            (chunk,) = scheduler.plan().chunks
            assert chunk.num_tokens >= max(1, lookahead)
            assert chunk.start == start
            scheduler.finish(one)  # and leaves a page that is not full


def test_an_unfinished_page_goes_to_one_who_goes_on_with_its_text():
    scheduler = make(max_rows=4, num_pages=40, max_chunk_tokens=64, lookahead=0)
    scheduler.add(first := sequence("a", 11, 64))
    scheduler.plan()
    scheduler.finish(first)
    text = first.token_ids
    for name in "bc":
        scheduler.add(SequenceState(name, [*text, 1, 2], 64))
    scheduler.add(SequenceState("d", [*text[:8], 7, *text[9:], 1, 2], 64))
    assert chunks(scheduler.plan()) == [("b", 9, 3), ("c", 8, 4), ("d", 8, 4)]
    b, c, d = scheduler.decoding
    assert len({b.pages[2], c.pages[2], d.pages[2]}) == 3
    scheduler.audit()


def test_a_page_whose_last_entry_looks_ahead_is_shared_when_what_it_saw_is():
    for lookahead, start in ((0, 16), (1, 12)):
        scheduler = make(max_rows=4, num_pages=40, max_chunk_tokens=64, lookahead=lookahead)
        scheduler.add(shared(16, 9, "a"))
        scheduler.add(shared(16, 9, "b"))  # parts from a where a page ends
        scheduler.add(shared(17, 9, "c"))  # and again, of its own
        scheduler.add(SequenceState("d", [*range(16), *range(9800, 9809)], 64))  # b's tokens again
        plan = scheduler.plan()
        assert [(name, at) for name, at, _ in chunks(plan)] == [("a", 0), ("b", start), ("c", 16 if lookahead == 0 else 12), ("d", 20)]  # fmt: skip  # noqa: E501
        scheduler.audit()


def test_salts_keep_pages_apart():
    scheduler = make(max_rows=4, num_pages=40, max_chunk_tokens=64, lookahead=0)
    for name, salt in (("a", None), ("b", "x"), ("c", "y"), ("d", "x")):
        one = SequenceState(name, list(range(20)), 64, cache_salt=salt)
        scheduler.add(one)
    assert [chunk.start for chunk in scheduler.plan().chunks] == [0, 0, 0, 16]


def test_one_who_must_see_its_whole_prompt_does():
    scheduler = make(max_rows=4, num_pages=40, max_chunk_tokens=64, lookahead=0)
    for name in "abc":
        scheduler.add(SequenceState(name, list(range(20)), 64, may_hit=name != "b"))
    assert [chunk.start for chunk in scheduler.plan().chunks] == [0, 0, 16]
    scheduler.audit()


def test_copies_of_a_long_prompt_wait_for_the_first():
    """Four answers to one prompt: three begin where it ends."""
    scheduler = make(max_rows=4, num_pages=60, max_chunk_tokens=8, lookahead=0)
    for name in "abcd":
        scheduler.add(SequenceState(name, list(range(42)), 60))
    total = 0
    while scheduler.num_waiting or not scheduler.decoding:
        total += sum(size for _, _, size in chunks(step(scheduler)))
    assert total == 41 + 3


def test_the_second_turn_of_a_chat_finds_the_first_answer():
    scheduler = make(max_rows=2, num_pages=40, max_chunk_tokens=64, lookahead=1, tokens_per_round=3)
    first = sequence("a", 21, 50)
    scheduler.add(first)
    while scheduler.has_work:
        step(scheduler, 3)
    scheduler.add(SequenceState("b", [*first.token_ids, 1, 2, 3], 80))
    # The last round's tokens are not there.
    assert chunks(scheduler.plan()) == [("b", 47, 5)]


def test_pages_that_a_drafter_has_not_taken_in_wait_for_it():
    scheduler = make(max_rows=2, num_pages=40, max_chunk_tokens=64, lookahead=0)
    one, seen = sequence("a", 6, 50), []
    scheduler.add(one)
    for is_taken_in in (True, False, False, True, False):
        scheduler.plan()
        scheduler.commit(one, [1, 2, 3, 4], is_taken_in=is_taken_in)
        seen.append(len(scheduler.allocator._name_of))
    assert seen == [1, 1, 1, 4, 4]
    scheduler.audit()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_second_turn_of_a_long_chat_prefills_little(lookahead):
    more = {"num_pages": 400, "block_size": 64, "max_chunk_tokens": 2048}
    scheduler = make(lookahead=lookahead, tokens_per_round=5, max_rounds=8, **more)
    first = sequence("a", 1000, 1200)
    scheduler.add(first)
    while scheduler.has_work:
        step(scheduler, 4)
    scheduler.add(SequenceState("b", [*first.token_ids, *range(12)], 1400))
    (chunk,) = scheduler.plan().chunks
    assert chunk.num_tokens < 40


def test_pages_are_forgotten_the_longest_unused_first_and_ends_before_beginnings():
    scheduler = make(max_rows=1, num_pages=8, max_chunk_tokens=64, lookahead=0)

    def run(name, length):
        one = SequenceState(name, [ord(name)] * length, length + 1)
        scheduler.add(one)
        (chunk,) = scheduler.plan().chunks
        scheduler.finish(one)
        scheduler.audit()
        return chunk.start

    assert [run("a", 18), run("b", 14)] == [0, 0]
    assert scheduler.allocator.num_cached == 7
    assert run("c", 13) == 0  # takes the last three of a, the first to come
    assert run("a", 18) == 4  # takes what was free, and the last two of b
    assert run("c", 13) == 11  # its last page, which is not full, is there too
