"""Host. Log-probabilities as callers get them: a dict a token, from the arrays of a round or of a prompt's chunk."""

from collections.abc import Sequence

import jax
import numpy as np

from jaxspec.engine.outputs import Logprob, TokenLogprobs
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.types import TokenLogprobs as Arrays


def describe(
    arrays: Arrays, row: int | tuple[int, ...], token_ids: Sequence[int], num_top: int, tokenizer: Tokenizer | None
) -> list[TokenLogprobs]:
    """One dict for each of token_ids, which stand at the first places of the row.

    Args:
        arrays: numpy; row: index of its axes before the places'.
        num_top: the likeliest to give beside the token itself; -1 = all there are.
    """
    num_places = len(token_ids)
    chosen, rank = arrays.chosen_BJ[row][:num_places].tolist(), arrays.rank_BJ[row][:num_places].tolist()
    end = arrays.top_BJX.shape[-1] if num_top == -1 else num_top
    top_ids = arrays.top_ids_BJX[row][:num_places, :end].tolist()
    top = arrays.top_BJX[row][:num_places, :end].tolist()
    entries = []
    for place, token_id in enumerate(token_ids):
        entry = {token_id: _logprob(token_id, chosen[place], rank[place], tokenizer)}
        for index, other in enumerate(top_ids[place]):
            if other != token_id:
                entry[other] = _logprob(other, top[place][index], index + 1, tokenizer)
        entries.append(entry)
    return entries


def on_host(arrays: Arrays) -> Arrays:
    """The same in numpy."""
    return jax.tree.map(np.asarray, arrays)


def _logprob(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer | None) -> Logprob:
    text = None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
    return Logprob(logprob, rank, text)
