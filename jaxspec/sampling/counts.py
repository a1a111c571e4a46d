"""Device. How often each token occurs in a row's text: what penalties hold against it."""

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxspec import shards
from jaxspec.pallas_kernels.rejection.penalties import SEEN_IN_PROMPT


def token_counts(
    history_BC: Int32[Array, "B C"], prompt_len_B: Int32[Array, " B"], len_B: Int32[Array, " B"], vocab_size: int
) -> Int32[Array, "B V"]:
    """Occurrences among the committed output tokens, plus the flag SEEN_IN_PROMPT for tokens of the prompt.

    Counted anew from the history each round, so that there is no count to roll back. Of a split vocabulary a shard
    counts its own ids.
    """
    B, C = history_BC.shape
    at_1C = jnp.arange(C, dtype=jnp.int32)[None]
    is_prompt_BC = at_1C < prompt_len_B[:, None]
    is_output_BC = ~is_prompt_BC & (at_1C < len_B[:, None])
    row_B1 = jnp.arange(B)[:, None]
    counts_BV = shards.split(jnp.zeros((B, shards.size_of_part(vocab_size)), jnp.int32))
    prompt_BC, output_BC = (
        shards.own_ids(jnp.where(is_one_BC, history_BC, vocab_size), counts_BV)
        for is_one_BC in (is_prompt_BC, is_output_BC)
    )
    counts_BV = counts_BV.at[row_B1, prompt_BC].max(SEEN_IN_PROMPT, mode="drop")
    return counts_BV.at[row_B1, output_BC].add(1, mode="drop")
