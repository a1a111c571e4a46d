"""Host. Continuous batching: who joins, whose prompt advances, who decodes and how far, in one plan a step.

There is one way in. A sequence is admitted with its committed tokens: a prompt, or prompt and answer so far of one that
had to give its pages up; with or without pages that hold its first tokens already.
"""

import itertools
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jaxspec.cache.allocator import PageAllocator
from jaxspec.cache.prefix import PageNames
from jaxspec.errors import CapacityError, QueueFullError
from jaxspec.scheduler.chunks import cut_into_chunks
from jaxspec.scheduler.request import SequenceState


@dataclass(frozen=True)
class Limits:
    """What a scheduler plans with.

    max_rows: sequences that run at once; num_pages of block_size tokens each; max_chunk_tokens: of prompts in a step,
    all together. chunk_tokens: ascending sizes that chunks are padded to; call_tokens: how many more tokens a chunk
    costs. tokens_per_round: the most that a decode round adds to a sequence; max_rounds: rounds in a step at
    most. lookahead: tokens behind a page that its entries depend on, None: pages are not shared. is_by_priority: lower
    priorities first, not the first to come. max_queued: sequences that may wait for more than a free row, None: any
    number. is_exact: entries made by decode rounds never stand for those of a prefill. So nothing is ever preempted, a
    sequence has every page it can need at once, and answers are not shared.
    """

    max_rows: int
    num_pages: int
    block_size: int
    max_chunk_tokens: int
    chunk_tokens: tuple[int, ...] = ()
    call_tokens: int = 0
    tokens_per_round: int = 1
    max_rounds: int = 1
    lookahead: int | None = None
    is_by_priority: bool = False
    max_queued: int | None = None
    is_exact: bool = False


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens [start, start + num_tokens) of a sequence; 0 tokens for a prompt of one."""

    sequence: SequenceState
    start: int
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is in the caches after it."""
        return self.start + self.num_tokens == len(self.sequence.token_ids) - 1


@dataclass(frozen=True)
class Plan:
    """One step, in order: rows to set, chunks to run, then one batch of at most num_rounds decode rounds.

    preempted: who has lost its row and pages, and waits. Chunks run in this order: a page may be read by the next chunk
    that one chunk fills.
    """

    preempted: tuple[SequenceState, ...]
    admitted: tuple[SequenceState, ...]
    chunks: tuple[PrefillChunk, ...]
    decoding: tuple[SequenceState, ...]
    num_rounds: int


class Scheduler:
    """Runs sequences in their order: first come, first served, or by priority.

    A sequence takes pages for its tokens and the rounds of a step. When they run short, the last in order of those that
    run gives its own up and waits again, in its place in the order; so the first always advances. Prompts advance by at
    most `max_chunk_tokens` a step, all together, and none keeps running sequences waiting for longer.
    """

    def __init__(self, limits: Limits, arrivals: Iterator[int] | None = None):
        """arrivals: ascending numbers, shared by those among whom sequences may move."""
        self.limits = limits
        self.allocator = PageAllocator(limits.num_pages)
        self._free_rows = list(range(limits.max_rows - 1, -1, -1))
        self._waiting: list[SequenceState] = []  # in order
        self._prefilling: list[SequenceState] = []
        self._decoding: list[SequenceState] = []
        self._arrivals = itertools.count() if arrivals is None else arrivals

    @property
    def waiting(self) -> tuple[SequenceState, ...]:
        """The sequences without a row, in their order."""
        return tuple(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def decoding(self) -> tuple[SequenceState, ...]:
        """The sequences whose prompts are in the cache."""
        return tuple(self._decoding)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._prefilling or self._decoding)

    @property
    def is_full(self) -> bool:
        """Whether so many wait that no more are taken."""
        most = self.limits.max_queued
        return most is not None and self.num_waiting - len(self._free_rows) >= most

    def num_found(self, sequence: SequenceState) -> int:
        """Tokens of a sequence that does not run which the cache holds."""
        self._name(sequence)
        return self._find(sequence)[1]

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence.

        Raises:
            QueueFullError: too many wait.
            CapacityError: it could never run, however long it waited.
        """
        limits = self.limits
        need, have = self._pages_for(sequence.max_len), self.allocator.num_pages
        if need > have:
            raise CapacityError(
                f"the request may grow to {sequence.max_len} tokens, {need} pages, but the cache has {have}; "
                "lower max_tokens or raise num_pages"
            )
        if self.is_full:
            raise QueueFullError(
                f"{self.num_waiting} answers wait, and max_queued_requests={limits.max_queued} may; try again later"
            )
        sequence.arrival = next(self._arrivals)
        self._name(sequence)
        self.take(sequence)

    def take(self, sequence: SequenceState) -> None:
        """Queue a sequence that has waited elsewhere, in its place in the order."""
        insort(self._waiting, sequence, key=self._order)

    def plan(self) -> Plan:
        """What to run now. The caller runs all of it, tells `commit` of every round, and `finish` of what ended."""
        preempted = self._make_room()
        admitted, chunks = [], []

        def budget() -> int:
            return self.limits.max_chunk_tokens - sum(chunk.num_tokens for chunk in chunks)

        for sequence in list(self._prefilling):
            if budget() <= 0:
                break
            chunks += self._next_chunks(sequence, budget())
        while budget() > 0 and self._waiting and self.can_admit(self._waiting[0]):
            admitted.append(self._admit(self._waiting.pop(0)))
            chunks += self._next_chunks(admitted[-1], budget())
        return Plan(tuple(preempted), tuple(admitted), tuple(chunks), self.decoding, self._settle_rounds())

    def can_go_ahead(self, num_launched: int) -> bool:
        """Whether rounds may follow those that run before the host has looked: nobody waits, not all may be over."""
        is_over = all(one.max_len - len(one.token_ids) <= num_launched for one in self._decoding)
        return not (self._waiting or self._prefilling or is_over)

    def plan_ahead(self, num_launched: int) -> int:
        """Rounds to run behind `num_launched` that run already and are not committed yet, with the same sequences.

        0 where the host must look first: somebody waits, pages are short, or all may have ended by then.
        """
        if not self.can_go_ahead(num_launched):
            return 0
        return self._grow_for_rounds(0, self.limits.max_rounds, num_launched)

    def commit(self, sequence: SequenceState, token_ids: Sequence[int], *, is_taken_in: bool = True) -> None:
        """Take what one decode round added. is_taken_in: its first pass has put all tokens before these into every
        cache, the drafter's too; else their pages are shared after a later round that has."""
        num_before = len(sequence.token_ids)
        sequence.token_ids.extend(token_ids)
        if is_taken_in and not self.limits.is_exact:
            self._name_pages(sequence, num_before)

    def finish(self, sequence: SequenceState) -> None:
        """Forget a sequence wherever it stands; its row and pages are free at once."""
        self._leave(sequence)

    def preempt(self, sequence: SequenceState) -> None:
        """Take a running sequence's row and pages; it waits, and goes on with what is committed."""
        self._leave(sequence)
        sequence.num_prefilled = sequence.num_named = 0
        self.take(sequence)

    def preempt_all(self) -> None:
        """Nothing that any page holds is left: everyone who runs waits, and begins with an empty cache."""
        for sequence in [*self._prefilling, *self._decoding]:
            self.preempt(sequence)
        self.forget_pages()

    def forget_pages(self) -> None:
        """Nothing runs, and what the pages hold is no longer what it was."""
        assert not self.num_running, "pages in use cannot be forgotten"
        self.allocator.forget()

    def reserve(self) -> None:
        """Take every page that those who decode may ever need, for a caller that runs rounds of its own."""
        for sequence in self._decoding:
            self._grow(sequence, sequence.max_len)

    def audit(self) -> None:
        """Every page and row is held or free; cheap, and run by tests after each step."""
        running = self._prefilling + self._decoding
        self.allocator.audit(page for sequence in running for page in sequence.pages)
        rows = [sequence.row for sequence in running] + self._free_rows
        assert len(rows) == len(set(rows)) == self.limits.max_rows, "a row is held twice, or lost"
        assert self._waiting == sorted(self._waiting, key=self._order), "the queue is out of order"

    def _order(self, sequence: SequenceState) -> tuple[int, int]:
        return sequence.priority if self.limits.is_by_priority else 0, sequence.arrival

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)

    def _extent(self, sequence: SequenceState, num_rounds: int) -> int:
        """Tokens whose places so many more rounds may write: the last token that a round adds has no entry yet."""
        if self.limits.is_exact:
            return sequence.max_len
        ahead = num_rounds * self.limits.tokens_per_round
        return min(sequence.max_len, len(sequence.token_ids) + ahead - 1)

    def _num_missing(self, sequences: Iterable[SequenceState], num_rounds: int) -> int:
        """Pages that they lack for so many rounds."""
        return sum(
            max(0, self._pages_for(self._extent(sequence, num_rounds)) - len(sequence.pages)) for sequence in sequences
        )

    def _grow(self, sequence: SequenceState, num_tokens: int) -> None:
        num_missing = self._pages_for(num_tokens) - len(sequence.pages)
        if num_missing > 0:
            sequence.pages += self.allocator.allocate(num_missing)

    def _make_room(self) -> list[SequenceState]:
        """Give everyone who decodes the pages of one round, in order, at the cost of the last; returns who paid."""
        preempted = []
        for sequence in sorted(self._decoding, key=self._order):
            while sequence.row >= 0 and not self.allocator.can_allocate(self._num_missing([sequence], 1)):
                preempted.append(max(self._prefilling + self._decoding, key=self._order))
                self.preempt(preempted[-1])
            if sequence.row >= 0:
                self._grow(sequence, self._extent(sequence, 1))
        return preempted

    def _settle_rounds(self) -> int:
        """As many rounds as there are pages for, and one only while prompts wait for a row or for their next chunk."""
        return self._grow_for_rounds(1, 1 if self._waiting or self._prefilling else self.limits.max_rounds)

    def _grow_for_rounds(self, least: int, most: int, num_launched: int = 0) -> int:
        """Pages for as many rounds as there are pages for; `least` are known to have theirs."""
        num_rounds = most
        while num_rounds > least and not self.allocator.can_allocate(
            self._num_missing(self._decoding, num_launched + num_rounds)
        ):
            num_rounds -= 1
        for sequence in self._decoding:
            self._grow(sequence, self._extent(sequence, num_launched + num_rounds))
        return num_rounds

    def _leave(self, sequence: SequenceState) -> None:
        for queue in (self._waiting, self._prefilling, self._decoding):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.row >= 0:
            self._name_part(sequence)
            self._free_rows.append(sequence.row)
            self.allocator.free(sequence.pages)
            sequence.row, sequence.pages = -1, []

    def _num_known(self, num_tokens: int) -> int:
        """Tokens that all entries may depend on once num_tokens went through the target. A drafter may be one token
        behind, and those that look ahead are as many as they look."""
        return num_tokens if self.limits.lookahead else num_tokens - 1

    def _find(self, sequence: SequenceState) -> tuple[list[int], int]:
        """Pages that hold its first tokens, and how many: of the last page perhaps only some.

        At least one token is left to prefill, and as many as a drafter's entries look ahead, so that its state of the
        row begins with them.
        """
        names, token_ids, size = sequence.names, sequence.token_ids, self.limits.block_size
        if names is None or not sequence.may_hit:
            return [], 0
        num_known = self._num_known(len(token_ids) - 1)
        pages = self.allocator.find(names.first(names.num_nameable(num_known), token_ids))
        start = len(pages) * size
        if self.limits.is_exact:
            return pages, start
        for end in range(min(start + size - 1, names.num_entries(num_known)), start, -1):
            page = self.allocator.find_idle(names.of_part(end, token_ids))
            if page is not None:
                return [*pages, page], end
        return pages, start

    def can_admit(self, sequence: SequenceState) -> bool:
        """Whether there is a row, and pages for it and for the next rounds of those who run: else it would soon pay."""
        if not self._free_rows:
            return False
        found, _ = self._find(sequence)
        num_new = self._pages_for(self._extent(sequence, 1)) - len(found)
        num_spared = self._num_missing(self._prefilling + self._decoding, 2)
        return self.allocator.can_allocate(num_new + num_spared, found)

    def _admit(self, sequence: SequenceState) -> SequenceState:
        found, num_tokens = self._find(sequence)
        num_full = num_tokens // self.limits.block_size
        self.allocator.hold(found[:num_full])
        for page in found[num_full:]:
            self.allocator.take(page)
        sequence.row, sequence.pages = self._free_rows.pop(), found
        sequence.num_prefilled, sequence.num_named, sequence.num_taken_in = num_tokens, num_full, 0
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_prefilled
        self._grow(sequence, self._extent(sequence, 1))
        self._prefilling.append(sequence)
        return sequence

    def _next_chunks(self, sequence: SequenceState, budget: int) -> list[PrefillChunk]:
        """Part of the step's budget for a prompt in line; one that completes decodes in this very step.

        Every prompt has at least one chunk, so that the proposer sees it: one of 0 tokens where there is only one.
        """
        num_tokens = min(sequence.num_to_prefill, budget)
        chunks = []
        for size in cut_into_chunks(num_tokens, self.limits.chunk_tokens or (num_tokens,), self.limits.call_tokens):
            chunks.append(PrefillChunk(sequence, sequence.num_prefilled, size))
            sequence.num_prefilled += size
        self._name_pages(sequence, sequence.num_prefilled)
        if sequence.num_to_prefill == 0:
            self._prefilling.remove(sequence)
            self._decoding.append(sequence)
        return chunks

    def _name(self, sequence: SequenceState) -> None:
        limits = self.limits
        if limits.lookahead is not None and sequence.names is None:
            sequence.names = PageNames(limits.block_size, limits.lookahead, sequence.cache_salt)

    def _name_pages(self, sequence: SequenceState, num_tokens: int) -> None:
        """Share the pages that nothing will change any more, when all caches have taken in num_tokens."""
        if sequence.names is None:
            return
        sequence.num_taken_in = num_tokens
        num_pages = sequence.names.num_nameable(self._num_known(num_tokens))
        names = sequence.names.first(num_pages, sequence.token_ids)
        for index in range(sequence.num_named, num_pages):
            self.allocator.name(sequence.pages[index], names[index])
        sequence.num_named = max(sequence.num_named, num_pages)

    def _name_part(self, sequence: SequenceState) -> None:
        """The page that a sequence leaves unfinished is for whoever goes on with the same text, one at a time: it is
        written on."""
        if sequence.names is None or self.limits.is_exact:
            return
        end = sequence.names.num_entries(self._num_known(sequence.num_taken_in))
        if sequence.num_named * self.limits.block_size < end:
            self.allocator.name(sequence.pages[sequence.num_named], sequence.names.of_part(end, sequence.token_ids))
