"""Device and host. The two protocols of custom logits processors: a pure function in the program, or a host callable.

A `LogitsProcessor` belongs to the engine (`Engine(logits_processors=[…])`), is compiled into every round and costs no
copy to the host. A `HostLogitsProcessor` belongs to a request (`SamplingParams(logits_processors=[…])`): rounds of a
batch that holds such a request stop between draft and judgement, and its logits travel to the host.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import struct

from jaxspec.sampling.params import SamplingParams


@struct.dataclass
class TokenContext:
    """The text that the logits of J positions continue; position j of a row follows its first j drafts."""

    history_BC: jax.Array  # i32, committed tokens; meaningless from len on
    prompt_len_B: jax.Array  # i32, tokens of the prompt among them
    len_B: jax.Array  # i32
    draft_ids_BK: jax.Array  # i32, -1 past the row's count


class LogitsProcessor(NamedTuple):
    """An engine-wide edit of the target's logits.

    columns(params) -> a pytree of numpy arrays, on the host, once a request: what `apply` has to know of it, of the
        same structure, shapes and dtypes for every request. `params.extra_args` is the caller's own. It raises
        RequestError for arguments it does not accept.
    apply(logits_BJV, columns, context) -> logits_BJV, on the device: pure; columns have a leading B; f32 in and out. It
        is given rows that did not ask too, some twice, and must leave them alone. -inf removes a token. Position j of a
        row follows its first j drafts (`TokenContext`): what apply does there may depend on them and on nothing later.
        Rounds look at positions one by one, each a row of its own (J = 1) with the drafts before it in its history.
    """

    columns: Callable[[SamplingParams], Any]
    apply: Callable[[jax.Array, Any, TokenContext], jax.Array]


class HostLogitsProcessor(Protocol):
    """A request's own edit, called for every position of every round: it must depend on its arguments alone."""

    def __call__(self, output_token_ids: Sequence[int], logits_V: np.ndarray) -> np.ndarray:
        """f32[V] after bias, masks and the engine's processors -> f32[V]; the argument may be changed in place."""
        ...
