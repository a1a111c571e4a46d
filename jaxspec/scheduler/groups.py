"""Host. Groups of devices side by side, each with a scheduler, rows and pages of its own; one group is all that most
engines have. A sequence is given to a group, and moves on only while it waits."""

import itertools
from collections.abc import Iterable, Sequence

from jaxspec.scheduler.request import SequenceState
from jaxspec.scheduler.scheduler import Limits, Plan, Scheduler


class Groups:
    """What a `Scheduler` is, for several: they plan together, since they run one program at a time."""

    def __init__(self, limits: Limits, num_groups: int = 1):
        """limits: of each group."""
        arrivals = itertools.count()
        self.limits = limits
        self.each = tuple(Scheduler(limits, arrivals) for _ in range(num_groups))

    @property
    def num_waiting(self) -> int:
        return sum(group.num_waiting for group in self.each)

    @property
    def num_running(self) -> int:
        return sum(group.num_running for group in self.each)

    @property
    def num_pages(self) -> int:
        return sum(group.allocator.num_pages for group in self.each)

    @property
    def num_used(self) -> int:
        """Pages that someone holds, each counted once."""
        return sum(group.allocator.num_used for group in self.each)

    @property
    def decoding(self) -> tuple[SequenceState, ...]:
        """The sequences whose prompts are in the cache, group by group."""
        return tuple(one for group in self.each for one in group.decoding)

    @property
    def has_work(self) -> bool:
        return any(group.has_work for group in self.each)

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence where it is likely to be answered first.

        A sequence there costs about as much as a chunk more to prefill: a long beginning that a group's cache holds
        draws the sequence there, a short one does not make that group longer than the others.

        Raises:
            QueueFullError, CapacityError: as `Scheduler.add`, when no group takes it.
        """

        def burden(group: Scheduler) -> tuple[bool, float]:
            num_saved = group.num_found(sequence) / self.limits.max_chunk_tokens
            return group.is_full, group.num_running + group.num_waiting - num_saved

        sequence.group = min(range(len(self.each)), key=lambda index: burden(self.each[index]))
        self.each[sequence.group].add(sequence)

    def plan(self) -> list[Plan]:
        """A plan a group, of one step. Their rounds run together: as many as the group with the fewest wants."""
        self._even_out()
        return [group.plan() for group in self.each]

    def plan_ahead(self, num_launched: int) -> int:
        """As a scheduler's; 0 where a group has to be looked at first."""
        busy = [group for group in self.each if group.has_work]
        if not all(group.can_go_ahead(num_launched) for group in busy):
            return 0
        return min((group.plan_ahead(num_launched) for group in busy), default=0)

    def commit(self, sequence: SequenceState, token_ids: Sequence[int], *, is_taken_in: bool = True) -> None:
        """As a scheduler's."""
        self._of(sequence).commit(sequence, token_ids, is_taken_in=is_taken_in)

    def finish(self, sequence: SequenceState) -> None:
        """As a scheduler's."""
        self._of(sequence).finish(sequence)

    def preempt(self, sequence: SequenceState) -> None:
        """As a scheduler's."""
        self._of(sequence).preempt(sequence)

    def preempt_all(self) -> None:
        """As a scheduler's."""
        for group in self.each:
            group.preempt_all()

    def forget_pages(self) -> None:
        """As a scheduler's."""
        for group in self.each:
            group.forget_pages()

    def reserve(self) -> None:
        """As a scheduler's."""
        for group in self.each:
            group.reserve()

    def audit(self) -> None:
        """As a scheduler's; and that everybody is where they believe to be."""
        for index, group in enumerate(self.each):
            group.audit()
            assert all(one.group == index for one in (*group.waiting, *group.decoding)), "a sequence is elsewhere"

    def _of(self, sequence: SequenceState) -> Scheduler:
        return self.each[sequence.group]

    def _even_out(self) -> None:
        """Who waits where there is no room goes where there is, one a step."""
        for index, free in enumerate(self.each):
            for group in self.each:
                if free.num_waiting:
                    break
                first = next(iter(group.waiting), None)
                if first is not None and not group.can_admit(first) and free.can_admit(first):
                    group.finish(first)
                    free.take(first)
                    first.group = index


def joined(plans: Iterable[Plan]) -> Plan:
    """What the groups' plans come to, group by group."""
    plans = tuple(plans)
    return Plan(
        tuple(one for plan in plans for one in plan.preempted),
        tuple(one for plan in plans for one in plan.admitted),
        tuple(one for plan in plans for one in plan.chunks),
        tuple(one for plan in plans for one in plan.decoding),
        min(plan.num_rounds for plan in plans),
    )
