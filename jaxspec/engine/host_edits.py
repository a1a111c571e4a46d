"""Host. What the host does to one sequence's logits between draft and judgement: grammar masks, logits processors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.errors import RequestError
from jaxspec.sampling.grammar import GrammarState
from jaxspec.sampling.processors import HostLogitsProcessor


@dataclass
class HostEdits:
    """Rounds of a batch with a sequence that needs them run in three parts."""

    processors: tuple[HostLogitsProcessor, ...] = ()
    grammar: GrammarState | None = None  # `commit_block` moves it

    @property
    def is_needed(self) -> bool:
        return bool(self.processors) or self.grammar is not None

    def fill_masks(self, draft_ids: Sequence[int], mask_JU: np.ndarray) -> None:
        """Write the ids allowed at each position (u32 masks; all set when called)."""
        if self.grammar is not None:
            self.grammar.fill_masks(draft_ids, mask_JU)

    def process(self, output_token_ids: Sequence[int], draft_ids: Sequence[int], logits_JV: np.ndarray) -> None:
        """Run the processors at every position that can yield a token, in place.

        Raises:
            RequestError: a processor gave back something other than logits.
        """
        for j in range(len(draft_ids) + 1):
            for processor in self.processors:
                edited = np.asarray(processor([*output_token_ids, *draft_ids[:j]], logits_JV[j].copy()))
                if edited.shape != logits_JV[j].shape or edited.dtype.kind != "f":
                    raise RequestError(
                        f"a logits processor must return {logits_JV[j].shape} floats, got {edited.shape} "
                        f"{edited.dtype}; return the array it was given",
                        param="logits_processors",
                    )
                logits_JV[j] = edited
