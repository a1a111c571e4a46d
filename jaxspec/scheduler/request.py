"""Host. One sequence the scheduler moves from waiting to running: lengths, pages and a row, no text and no arrays."""

from dataclasses import dataclass, field


@dataclass(eq=False)
class SequenceState:
    """Progress of one sequence in tokens.

    num_prefilled: prompt tokens in the cache; decoding needs all but the last of them.
    max_len: prompt and answer together can never be longer; pages for all of it are taken at admission.
    """

    sequence_id: str
    num_prompt_tokens: int
    max_len: int
    row: int = -1
    num_prefilled: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def num_to_prefill(self) -> int:
        """Prompt tokens still missing from the cache; the last one is fed by the first decode round."""
        return self.num_prompt_tokens - 1 - self.num_prefilled
