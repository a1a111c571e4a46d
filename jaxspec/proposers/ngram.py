"""Device. Guesses copied from a row's own context: what followed the longest earlier occurrence of its last tokens."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxspec.proposers.base import Proposer, RowView
from jaxspec.types import Drafts

Match = Literal["earliest", "latest"]


def match(
    history_BC: Int32[Array, "B C"],
    len_B: Int32[Array, " B"],
    *,
    min_n: int,
    max_n: int,
    num_tokens: int,
    max_model_len: int,
    prompt_lookup_match: Match = "earliest",
) -> Drafts:
    """Look each row's suffix up in the row itself, and propose what followed.

    Of the suffixes of min_n to max_n tokens the longest that also occurs earlier counts (it may overlap itself), and of
    its occurrences the earliest, as in vLLM, or the latest. Proposed is what follows there: at most num_tokens, never
    past the end of the context, and never beyond max_model_len. One sweep over the history, no [C, C] table.

    Args:
        history_BC: token ids; what stands at and past len is not looked at.
        len_B: committed tokens; 0 for a row that is to draft nothing.
    Returns: drafts as point masses; -1 past the row's count.
    """
    B, C = history_BC.shape
    # An occurrence ends before position e, which then holds what followed it: e in [1, len).
    e_1C = jnp.arange(C, dtype=jnp.int32)[None]
    len_B1 = len_B[:, None]
    length_BC = jnp.zeros((B, C), jnp.int32)  # of the common suffix of history[:e] and history[:len]
    is_running_BC = e_1C < len_B1
    # Left of the history stands what equals no token, so that column e of a shifted view is history[e - 1 - back].
    padded = jnp.pad(history_BC, ((0, 0), (max_n, 0)), constant_values=-1)
    for back in range(max_n):
        suffix_B1 = jnp.take_along_axis(history_BC, jnp.maximum(len_B1 - 1 - back, 0), axis=1)
        shifted_BC = padded[:, max_n - 1 - back : max_n - 1 - back + C]
        is_running_BC = is_running_BC & (shifted_BC == suffix_B1) & (e_1C > back)
        length_BC = length_BC + is_running_BC.astype(jnp.int32)

    longest_B = jnp.max(length_BC, axis=1)
    is_longest_BC = length_BC == longest_B[:, None]
    if prompt_lookup_match == "earliest":
        follows_B = jnp.min(jnp.where(is_longest_BC, e_1C, C), axis=1)
    else:
        follows_B = jnp.max(jnp.where(is_longest_BC & (e_1C < len_B1), e_1C, 0), axis=1)

    num_follow_B = jnp.minimum(len_B - follows_B, max_model_len - len_B)
    counts_B = jnp.where(longest_B >= min_n, jnp.clip(num_follow_B, 0, num_tokens), 0)
    k_1K = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    copied_BK = jnp.take_along_axis(history_BC, jnp.minimum(follows_B[:, None] + k_1K, C - 1), axis=1)
    return Drafts(token_ids_BK=jnp.where(k_1K < counts_B[:, None], copied_BK, -1), counts_B=counts_B)


def ngram(*, num_tokens: int, min_n: int, max_n: int, max_model_len: int, match_rule: Match = "earliest") -> Proposer:
    """Prompt lookup as a `Proposer`: no state, no weights, and no host read, since the history lives on the device."""

    def propose(weights, state, view: RowView):
        del weights
        drafts = match(
            view.history_BC,
            jnp.where(view.is_active_B, view.len_B, 0),
            min_n=min_n,
            max_n=max_n,
            num_tokens=num_tokens,
            max_model_len=max_model_len,
            prompt_lookup_match=match_rule,
        )
        return drafts, state

    def prefill(weights, state, rows_B, tokens, seen_BTX):
        return state

    return Proposer(num_tokens, lambda num_rows: (), prefill, propose, page_lookahead=0)
