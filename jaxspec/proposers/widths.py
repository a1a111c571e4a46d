"""Device and host. How many of a round's drafts are worth verifying: a rule over what each draft promises and what each
width of a round costs. The same function runs in the round (jax.numpy) and beside it (numpy).

A round that verifies w drafts a row gives each row 1 + sum(survival of its first min(w, count) drafts) tokens, where
survival is the chance that a draft and all before it are kept. The best width gives the most tokens a second.
"""

from collections.abc import Sequence
from typing import Any


def tokens_by_width(xp: Any, survival_BK: Any, counts_B: Any, is_active_B: Any, widths: Sequence[int]) -> Any:
    """f32[W]: tokens that a round of each width is expected to give, over all active rows.

    Args:
        xp: numpy or jax.numpy.
        survival_BK: f32, in [0, 1], of each row's k-th draft and all before it.
        counts_B: drafts that each row has.
        widths: of the rounds there are.
    """
    k_1K = xp.arange(survival_BK.shape[1], dtype=xp.int32)[None, :]
    is_there_BK = (k_1K < counts_B[:, None]) & is_active_B[:, None]
    by_draft_K = xp.sum(xp.where(is_there_BK, survival_BK, xp.float32(0)), axis=0)
    num_rows = xp.sum(is_active_B.astype(xp.float32))
    return xp.stack([num_rows + xp.sum(by_draft_K[:width]) for width in widths])


def best_width(
    xp: Any, survival_BK: Any, counts_B: Any, is_active_B: Any, seconds_W: Any, widths: Sequence[int]
) -> Any:
    """The index in `widths` (ascending) of the round with the most tokens a second; the narrowest of equals.

    Without a draft it is the narrowest round, and no round is wider than the drafts that there are.
    """
    speed_W = tokens_by_width(xp, survival_BK, counts_B, is_active_B, widths) / seconds_W
    return xp.minimum(xp.argmax(speed_W).astype(xp.int32), narrowest(xp, counts_B, widths))


def narrowest(xp: Any, counts_B: Any, widths: Sequence[int]) -> Any:
    """The index in `widths` (ascending) of the first that holds all drafts; the last where none does."""
    short_W = xp.asarray(widths[:-1], dtype=xp.int32) < xp.max(counts_B)
    return xp.sum(short_W.astype(xp.int32)).astype(xp.int32)
