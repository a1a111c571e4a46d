"""Host. T12 without a device: random schedules over pages whose every entry says what it was made of.

A fake device runs the plans. An entry of the target's cache is the tuple of tokens that it depends on, one of the
drafter's likewise with those it looks ahead; what nobody holds is poisoned. The next token is a function of everything
that is read, so that a wrong page gives another text.
"""

import hashlib

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxspec.scheduler.request import SequenceState
from jaxspec.scheduler.scheduler import Limits, Scheduler

POISON = "poison"
VOCAB_SIZE = 5


def next_token(token_ids):
    """Plain decoding: what follows these tokens."""
    return hashlib.sha256(bytes(token_ids)).digest()[0] % VOCAB_SIZE


class FakeDevice:
    """Target and drafter caches of pages. The drafter looks `lookahead` tokens ahead and is `behind` in a round, as the
    real ones: (0, 0) is a model, (0, 1) reads states, (1, 0) is a head, (3, 0) three modules."""

    def __init__(self, limits: Limits, behind: int):
        self.limits, self.lookahead, self.behind = limits, limits.lookahead or 0, behind
        self.lose()
        self.shared = {}  # pages that had a name when the step began
        self.begin, self.taken = {}, {}  # by row: first position with a state, drafter entries made

    def lose(self):
        self.pools = [[[POISON] * self.limits.block_size for _ in range(self.limits.num_pages)] for _ in range(2)]

    def write(self, pool, sequence, position, entry, scheduler):
        index, slot = divmod(position, self.limits.block_size)
        if index >= len(sequence.pages):
            assert entry == "draft", "no page for a committed token"
            return
        page = sequence.pages[index]
        name = scheduler.allocator._name_of.get(page)
        if name is not None and self.shared.get(page) == name:
            before = self.pools[pool][page][slot]
            assert before == entry, f"a shared page changes from {before} to {entry}"
        self.pools[pool][page][slot] = entry

    def check(self, pool, sequence, end, ahead=0):
        """Whether entries [0, end) are those of this sequence."""
        for position in range(end):
            index, slot = divmod(position, self.limits.block_size)
            wanted = tuple(sequence.token_ids[: position + 1 + ahead])
            assert self.pools[pool][sequence.pages[index]][slot] == wanted

    def admit(self, sequence):
        self.begin[sequence.row] = None

    def prefill(self, chunk, scheduler):
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        if self.begin[sequence.row] is None:
            self.begin[sequence.row] = self.taken[sequence.row] = chunk.start
        self.check(0, sequence, chunk.start)
        for position in range(chunk.start, end):
            self.write(0, sequence, position, tuple(sequence.token_ids[: position + 1]), scheduler)
        self.take_in(sequence, end, scheduler)

    def take_in(self, sequence, num_tokens, scheduler):
        """The drafter makes the entries that so many tokens allow; for those before `begin` it has no state."""
        self.check(1, sequence, self.begin[sequence.row], self.lookahead)
        for position in range(self.taken[sequence.row], num_tokens - self.lookahead):
            entry = tuple(sequence.token_ids[: position + 1 + self.lookahead])
            self.write(1, sequence, position, entry, scheduler)
            self.taken[sequence.row] = position + 1

    def round(self, sequence, num_accepted, scheduler):
        """Returns what it commits: drafts that are right, and one more."""
        length, K = len(sequence.token_ids), self.limits.tokens_per_round - 1
        self.take_in(sequence, length - self.behind, scheduler)
        self.check(1, sequence, length - self.behind - self.lookahead, self.lookahead)
        for position in range(length - self.behind - self.lookahead, min(length + K, sequence.max_len)):
            self.write(1, sequence, position, "draft", scheduler)
        self.check(0, sequence, length - 1)
        text = list(sequence.token_ids)
        for offset in range(K + 1):
            position = length - 1 + offset
            entry = tuple(text) if offset <= num_accepted else "draft"
            if position < sequence.max_len:
                self.write(0, sequence, position, entry, scheduler)
            text.append(next_token(text))
        room = sequence.max_len - length
        return text[length : length + min(num_accepted + 1, room)]


class Schedules(RuleBasedStateMachine):
    """The class's own attributes are a test's."""

    block_size, lookahead, behind = 4, 0, 0

    def __init__(self):
        super().__init__()
        limits = Limits(
            max_rows=3, num_pages=max(4, 48 // self.block_size), block_size=self.block_size, max_chunk_tokens=8,
            tokens_per_round=4, max_rounds=3, lookahead=self.lookahead, is_by_priority=True,
        )  # fmt: skip
        self.scheduler, self.device = Scheduler(limits), FakeDevice(limits, self.behind)
        self.alive, self.num_added = {}, 0

    @rule(
        num_shared=st.integers(0, 20), num_own=st.integers(1, 12), num_output=st.integers(1, 20),
        priority=st.integers(-1, 1), data=st.integers(0, 2**32),
    )  # fmt: skip
    def add(self, num_shared, num_own, num_output, priority, data):
        most = 40 - num_output
        prompt = [*([3] * num_shared), *(int(c) % VOCAB_SIZE for c in str(data).rjust(num_own, "0"))][:most]
        if self.alive and data % 3 == 0:  # a conversation goes on
            said = next(iter(self.alive.values()))[1].token_ids
            prompt = [*said, 1][:most]
        one = SequenceState(str(self.num_added), prompt, len(prompt) + num_output, priority=priority)
        self.num_added += 1
        self.scheduler.add(one)
        self.alive[one.sequence_id] = (list(prompt), one)

    @rule(accepted=st.lists(st.integers(0, 3), min_size=1, max_size=9))
    def step(self, accepted):
        running = [one for _, one in self.alive.values() if one.row >= 0]
        plan = self.scheduler.plan()
        self.scheduler.audit()
        for one in plan.admitted:
            self.device.admit(one)
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= self.scheduler.limits.max_chunk_tokens
        for chunk in plan.chunks:
            self.device.prefill(chunk, self.scheduler)
        assert plan.chunks or plan.decoding or not self.alive, "a plan with nothing in it would wait for ever"
        assert not running or min(running, key=self.scheduler._order) not in plan.preempted, "the first always advances"
        for _ in range(plan.num_rounds):
            for index, one in enumerate(plan.decoding):
                if one.sequence_id in self.alive:
                    new = self.device.round(one, accepted[index % len(accepted)], self.scheduler)
                    self.scheduler.commit(one, new)
                    if len(one.token_ids) == one.max_len:
                        self.end(one)

    def end(self, one):
        prompt, _ = self.alive.pop(one.sequence_id)
        text = list(prompt)
        while len(text) < len(one.token_ids):
            text.append(next_token(text))
        assert one.token_ids == text
        self.scheduler.finish(one)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 99))
    def abort(self, which):
        self.end(list(self.alive.values())[which % len(self.alive)][1])

    @precondition(lambda self: self.scheduler.num_running)
    @rule()
    def preempt(self):
        running = self.scheduler._prefilling + self.scheduler._decoding
        self.scheduler.preempt(running[-1])

    @rule()
    def fail(self):
        """The device loses its state."""
        self.scheduler.preempt_all()
        self.device.lose()

    @invariant()
    def pages_are_conserved(self):
        self.scheduler.audit()
        allocator = self.scheduler.allocator
        assert len(allocator.free_pages) + allocator.num_cached + allocator.num_used == allocator.num_pages
        self.device.shared = dict(allocator._name_of)
        for pool in self.device.pools:
            for page in allocator.free_pages:
                pool[page] = [POISON] * self.block_size

    def teardown(self):
        for _ in range(1000):
            if not self.scheduler.has_work:
                break
            self.step([1])
            self.pages_are_conserved()
        assert not self.alive
        assert self.scheduler.allocator.num_used == 0


@pytest.mark.parametrize(("lookahead", "behind"), [(None, 0), (0, 0), (0, 1), (1, 0), (3, 0)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_random_schedules(block_size, lookahead, behind):
    kind = type("Schedules", (Schedules,), {"block_size": block_size, "lookahead": lookahead, "behind": behind})
    options = settings(
        max_examples=12, stateful_step_count=30, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    case = kind.TestCase
    case.settings = options
    case("runTest").runTest()
