"""Host. One sequence the scheduler moves between waiting and running: tokens, pages and a row, no text, no arrays."""

from dataclasses import dataclass, field

from jaxspec.cache.prefix import PageNames


@dataclass(eq=False)
class SequenceState:
    """Progress of one sequence in tokens.

    token_ids: committed, the prompt first; the answer grows here. max_len: they can never be more. priority: lower runs
    first, where the policy asks. cache_salt: pages are shared among sequences of the same salt. may_hit: False where
    the whole prompt must go through the target. num_prefilled: tokens in the caches before decoding begins, which needs
    all but the last. num_cached_tokens: those that the first admission found there, None before it.
    """

    sequence_id: str
    token_ids: list[int]
    max_len: int
    priority: int = 0
    cache_salt: str | None = None
    may_hit: bool = True
    row: int = -1
    num_prefilled: int = 0
    num_cached_tokens: int | None = None
    pages: list[int] = field(default_factory=list)
    group: int = 0  # whose rows and pages these are
    # The scheduler's own.
    arrival: int = -1
    names: PageNames | None = None  # None: its pages are not shared
    num_named: int = 0
    num_taken_in: int = 0  # tokens that went through every cache, since the last admission

    @property
    def num_to_prefill(self) -> int:
        """Tokens still missing from the cache; the last one is fed by the first decode round."""
        return len(self.token_ids) - 1 - self.num_prefilled
