"""Device and host. The two protocols of those who guess: pure functions in the program, or a host object beside it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.models.base import Tokens
from jaxspec.types import Drafts, SamplingTable

ProposerState = Any  # a pytree of arrays whose leading axis, where it counts rows, is the engine's row table


@struct.dataclass
class RowView:
    """What a proposer sees of the rows in a batch, B of them."""

    rows_B: jax.Array  # i32, the row's index in the engine's row table: where per-row proposer state lives
    is_active_B: jax.Array  # bool; an inactive row drafts nothing and writes nothing
    history_BC: jax.Array  # i32, committed tokens; meaningless from len on
    len_B: jax.Array  # i32, committed tokens
    max_len_B: jax.Array  # i32, tokens the row may ever hold
    pages_BM: jax.Array  # i32, -1 = none; a proposer's own pool has the same page ids
    table: SamplingTable  # the rows' sampling parameters and request keys
    max_drafts_B: jax.Array | None = None  # i32, the most drafts the round makes for the row; None: K


class Proposer(NamedTuple):
    """One drafting method, as pure functions compiled into the round.

    init(num_rows) -> state, on the host.
    prefill(weights, state, rows_B, tokens, seen_BTX) -> state: the prompt's tokens as the target saw them; called at
        least once a request, with no valid token for a one-token prompt. The first token's position 0 resets the row.
    propose(weights, state, view) -> (Drafts, state): K drafts a row, following history[:len]. Not called in a round in
        which no row may draft, unless `sees_plain_rounds`: what was committed meanwhile is in the history.
    commit(state, view, seen_BJX, num_kept_B) -> state: what the target saw in a round of J positions from len - 1 on,
        of which the row keeps the first num_kept; the view is the one the round began with. None where it is no use:
        then no program hands it on.
    aux_streams: of the target's residual streams (stream i enters layer i) those that `seen` holds, in this order,
        behind the hidden state after the final norm.
    page_lookahead: what the proposer keeps of a position, in pages of its own, depends on the tokens up to it and this
        many behind it, and on nothing else; 0 for one that keeps nothing. Requests that begin alike then share pages,
        and `prefill` may begin where they end, not at the first token. None does not say so: nothing is shared.
    forget(state, row) -> state: a request takes the row (i32[]); what was kept of its last one means nothing now. None:
        nothing is kept that `prefill` does not set.
    is_in_target_pool: `propose` is given the target's page pool in place of a state, and returns it. What it writes at
        or behind a row's last committed token is overwritten before it is read: there the target writes its own.
    sees_plain_rounds: `propose` takes in what `commit` left of the round before, and must not miss one.
    `weights` is {"target": ..., "draft": ...}. `num_tokens` is K; with 0 the round is plain decoding.
    """

    num_tokens: int
    init: Callable[[int], ProposerState]
    prefill: Callable[[Any, ProposerState, jax.Array, Tokens, jax.Array], ProposerState]
    propose: Callable[[Any, ProposerState, RowView], tuple[Drafts, ProposerState]]
    commit: Callable[[ProposerState, RowView, jax.Array, jax.Array], ProposerState] | None = None
    aux_streams: tuple[int, ...] = ()
    is_in_target_pool: bool = False
    sees_plain_rounds: bool = False
    page_lookahead: int | None = None
    forget: Callable[[ProposerState, jax.Array], ProposerState] | None = None


class HostProposer(Protocol):
    """A drafting method that lives on the host; the engine then runs the split pair and asks it in between."""

    num_tokens: int

    def observe(self, request_id: str, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        """All committed tokens of a request, after its prefill and after every round.

        An id names one answer: of a request with n > 1 each has its own.
        """
        ...

    def propose(self, request_ids: Sequence[str]) -> list[list[int]]:
        """For each request at most `num_tokens` guesses of what follows; an empty list guesses nothing."""
        ...

    def finish(self, request_id: str) -> None:
        """The request is over, perhaps before it was ever observed; its state may go."""
        ...


def no_proposer() -> Proposer:
    """Plain decoding: K = 0, no drafts, no state."""

    def propose(weights, state, view: RowView) -> tuple[Drafts, ProposerState]:
        del weights
        rows = view.len_B.shape[0]
        return Drafts(token_ids_BK=jnp.zeros((rows, 0), jnp.int32), counts_B=jnp.zeros(rows, jnp.int32)), state

    def prefill(weights, state, rows_B, tokens, seen_BTX) -> ProposerState:
        return state

    return Proposer(0, lambda num_rows: (), prefill, propose, page_lookahead=0)
