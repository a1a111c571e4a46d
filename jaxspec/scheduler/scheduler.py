"""Host. Continuous batching: who joins, whose prompt advances, who decodes, in one plan a step."""

from collections import deque
from dataclasses import dataclass

from jaxspec.cache.allocator import PageAllocator
from jaxspec.errors import CapacityError
from jaxspec.scheduler.request import SequenceState


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens [start, start + num_tokens) of a sequence's prompt; 0 tokens for a prompt of one."""

    sequence: SequenceState
    start: int
    num_tokens: int


@dataclass(frozen=True)
class Plan:
    """One step, in order: rows to set, chunks to run, then one batch of decode rounds."""

    admitted: tuple[SequenceState, ...]
    chunks: tuple[PrefillChunk, ...]
    decoding: tuple[SequenceState, ...]


class Scheduler:
    """First come, first served. A sequence is admitted when a row and every page it can ever need are free, so that
    no running sequence has to be thrown out; prompts advance by at most `max_chunk_tokens` a step, all together."""

    def __init__(self, *, max_rows: int, num_pages: int, block_size: int, max_chunk_tokens: int):
        self._max_chunk_tokens = max_chunk_tokens
        self._block_size = block_size
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._waiting: deque[SequenceState] = deque()
        self._prefilling: list[SequenceState] = []
        self._decoding: list[SequenceState] = []
        self.allocator = PageAllocator(num_pages)

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
    def only_decodes(self) -> bool:
        """Whether no prompt waits for a row or for its next chunk."""
        return not self._waiting and not self._prefilling

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._prefilling or self._decoding)

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence.

        Raises:
            CapacityError: it could never run, however long it waited.
        """
        need, have = self._pages_for(sequence), self.allocator.num_pages
        if need > have:
            raise CapacityError(
                f"the request may grow to {sequence.max_len} tokens, {need} pages, but the cache has {have}; "
                "lower max_tokens or raise num_pages"
            )
        self._waiting.append(sequence)

    def plan(self) -> Plan:
        """What to run now. The caller runs all of it, then calls `finish` for what ended."""
        admitted = []
        while self._waiting and self._can_admit(self._waiting[0]):
            admitted.append(self._admit(self._waiting.popleft()))
        chunks = self._chunks()
        return Plan(tuple(admitted), chunks, self.decoding)

    def finish(self, sequence: SequenceState) -> None:
        """Forget a sequence wherever it stands; its row and pages are free at once."""
        for queue in (self._waiting, self._prefilling, self._decoding):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.row >= 0:
            self._free_rows.append(sequence.row)
            self.allocator.free(sequence.pages)
            sequence.row, sequence.pages = -1, []

    def audit(self) -> None:
        """Every page and row is held once or free; cheap, and run by tests after each step."""
        running = self._prefilling + self._decoding
        self.allocator.audit(page for sequence in running for page in sequence.pages)
        rows = [sequence.row for sequence in running] + self._free_rows
        assert len(rows) == len(set(rows)), "a row is held twice"

    def _pages_for(self, sequence: SequenceState) -> int:
        return -(-sequence.max_len // self._block_size)

    def _can_admit(self, sequence: SequenceState) -> bool:
        return bool(self._free_rows) and self.allocator.can_allocate(self._pages_for(sequence))

    def _admit(self, sequence: SequenceState) -> SequenceState:
        sequence.row = self._free_rows.pop()
        sequence.pages = self.allocator.allocate(self._pages_for(sequence))
        self._prefilling.append(sequence)
        return sequence

    def _chunks(self) -> tuple[PrefillChunk, ...]:
        """Split the step's token budget over the prompts in line; a prompt that completes decodes in this very step.

        Every prompt has at least one chunk, so that the proposer sees it: one of 0 tokens where there is only one.
        """
        budget = self._max_chunk_tokens
        chunks = []
        for sequence in list(self._prefilling):
            num_tokens = min(sequence.num_to_prefill, budget)
            chunks.append(PrefillChunk(sequence, sequence.num_prefilled, num_tokens))
            sequence.num_prefilled += num_tokens
            budget -= num_tokens
            if sequence.num_to_prefill == 0:
                self._prefilling.remove(sequence)
                self._decoding.append(sequence)
            if budget <= 0:
                break
        return tuple(chunks)
