"""Host. Groups of devices: who goes where, who moves on, and that nobody is lost between them."""

import numpy as np
import pytest

from jaxspec.errors import CapacityError, QueueFullError
from jaxspec.scheduler.groups import Groups, joined
from jaxspec.scheduler.request import SequenceState
from jaxspec.scheduler.scheduler import Limits

PAGE, CHUNK = 4, 8


def make(num_groups=2, max_rows=2, num_pages=16, **more):
    return Groups(Limits(max_rows, num_pages, PAGE, CHUNK, **({"lookahead": 0} | more)), num_groups)


def sequence(name, prompt, max_len=None):
    """prompt: its tokens, or how many of its own it has."""
    if isinstance(prompt, int):
        prompt = list(range(1000 * sum(map(ord, name)), 1000 * sum(map(ord, name)) + prompt))
    return SequenceState(name, prompt, max_len or len(prompt) + 4)


def add(groups, *sequences):
    for one in sequences:
        groups.add(one)
    return [one.group for one in sequences]


def step(groups):
    """Run a step in which everyone who decodes gets a token; those at their end leave."""
    plans = groups.plan()
    for one in [one for plan in plans for one in plan.decoding]:
        groups.commit(one, [7])
        if len(one.token_ids) == one.max_len:
            groups.finish(one)
    groups.audit()
    return plans


def test_sequences_spread_evenly():
    groups = make(num_groups=3)
    assert add(groups, *(sequence(name, 3) for name in "abcdef")) == [0, 1, 2, 0, 1, 2]
    step(groups)
    assert [group.num_running for group in groups.each] == [2, 2, 2]


def test_who_has_a_long_beginning_in_a_cache_goes_there():
    groups, start = make(), list(range(24))
    first = sequence("first", [*start, 30])
    assert add(groups, sequence("other", 3, 40), first) == [0, 1]
    while groups.each[1].has_work:
        step(groups)
    follower = sequence("follower", [*start, 40, 41])
    assert add(groups, sequence("short", 5), sequence("brief", 5), follower) == [1, 0, 1]
    assert follower.num_cached_tokens is None
    step(groups)
    assert follower.num_cached_tokens == 24


def test_a_short_beginning_that_all_share_fills_no_group_alone():
    groups = make(max_rows=8, num_pages=64)
    prompts = [[1, 2, 3, 4, 5, index] for index in range(8)]
    places = []
    for index, prompt in enumerate(prompts):
        places += add(groups, sequence(str(index), prompt, 40))
        step(groups)
    assert sorted(places) == [0] * 4 + [1] * 4


def test_who_waits_in_vain_goes_where_there_is_room():
    groups, moves = make(max_rows=1), sequence("c", 3, 6)
    assert add(groups, sequence("a", 3, 30), sequence("b", 3, 5), moves, sequence("d", 3)) == [0, 1, 0, 1]
    for _ in range(20):
        step(groups)
    assert moves.group == 1
    assert groups.num_running == 1  # a is still at it, all others are done
    assert groups.num_waiting == 0


def test_a_full_queue_and_what_never_fits():
    groups = make(max_rows=1, max_queued=1)
    add(groups, *(sequence(name, 3) for name in "abcd"))
    with pytest.raises(QueueFullError):
        add(groups, sequence("e", 3))
    with pytest.raises(CapacityError):
        add(make(), sequence("long", 5, 100))


def test_rounds_are_those_of_the_group_that_wants_the_fewest():
    groups = make(max_rounds=8)
    add(groups, sequence("a", 3, 60), sequence("b", 20, 60))
    plans = groups.plan()
    assert [len(plan.decoding) for plan in plans] == [1, 0]
    assert joined(plans).num_rounds == 1
    assert groups.plan_ahead(1) == 0  # b has a chunk to go
    groups.plan()
    plans = groups.plan()
    assert [one.sequence_id for one in joined(plans).decoding] == ["a", "b"]
    assert joined(plans).num_rounds == 8
    assert groups.plan_ahead(8) == 8
    groups.preempt(groups.decoding[0])
    assert groups.plan_ahead(8) == 0
    groups.audit()


def test_an_idle_group_holds_nobody_up():
    groups = make(max_rounds=8)
    add(groups, sequence("a", 3, 60))
    assert joined(groups.plan()).num_rounds == 8
    assert groups.plan_ahead(8) == 8
    assert make().plan_ahead(1) == 0


def test_nobody_is_lost():
    """Arrivals, aborts and preemptions at random; all who were not aborted end."""
    rng = np.random.default_rng(0)
    groups = make(num_groups=3, max_rows=2, num_pages=10, tokens_per_round=3)
    there, ended = {}, 0
    for number in range(400):
        if number < 300 and rng.random() < 0.5:
            one = sequence(str(number), rng.integers(0, 3, rng.integers(1, 24)).tolist())
            groups.add(one)
            there[one.sequence_id] = one
        step(groups)
        if there and rng.random() < 0.05:
            groups.finish(there.pop(rng.choice(list(there))))
        if groups.decoding and rng.random() < 0.1:
            groups.preempt(groups.decoding[-1])
        if number % 100 == 50:
            groups.preempt_all()
        groups.audit()
        over = [name for name, one in there.items() if len(one.token_ids) == one.max_len]
        ended += len(over)
        for name in over:
            del there[name]
    while groups.has_work:
        step(groups)
    assert all(len(one.token_ids) == one.max_len for one in there.values())
    assert ended > 50
    assert groups.num_used == 0
