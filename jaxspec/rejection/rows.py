"""Host. Verified rows and draft histories as plain lists, for whoever reads one round on the host."""

from collections.abc import Sequence

import numpy as np


def parse_output(token_ids_BJ: np.ndarray | Sequence[Sequence[int]], vocab_size: int) -> list[list[int]]:
    """Each row's tokens, without the -1 past them and without ids outside the vocabulary."""
    return [[int(token) for token in row if 0 <= token < vocab_size] for row in token_ids_BJ]


def draft_histories(outputs: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What each draft's position has behind it: its request's outputs and the drafts before it, request by request.

    A request without drafts has no such position.
    """
    return [[*output, *row[:place]] for output, row in zip(outputs, drafts, strict=True) for place in range(len(row))]
