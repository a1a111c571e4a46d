"""Device and host. Drafters that know the answer, and are wrong where told: they force any pattern of acceptance."""

import dataclasses
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.proposers.base import Proposer, RowView
from jaxspec.types import Drafts

MAX_KNOWN = 16


@dataclass(frozen=True)
class Script:
    """What is known of one request, and where to go wrong.

    token_ids: prompt and answer. wrong: {absolute position: the id guessed there instead}. num_drafts: {anchor: drafts
    in the round that begins at that length}, all there are elsewhere.
    """

    token_ids: list[int]
    wrong: dict[int, int] = field(default_factory=dict)
    num_drafts: dict[int, int] = field(default_factory=dict)

    def drafts(self, anchor: int, limit: int) -> list[int]:
        """The guesses of a round that begins with `anchor` tokens."""
        end = min(len(self.token_ids), anchor + min(limit, self.num_drafts.get(anchor, limit)))
        return [self.wrong.get(at, self.token_ids[at]) for at in range(anchor, end)]


def set_scripts(engine, proposer, scripts: list[Script]) -> None:
    """What a replay drafter of this idle engine knows from now on."""
    if isinstance(proposer, HostReplay):
        proposer.scripts = scripts
    else:
        table, before = make_table(scripts, engine.config.max_model_len), engine.core.state.proposer
        table = jax.tree.map(
            lambda new, old: jax.device_put(jnp.broadcast_to(new, old.shape), old.sharding), table, before
        )
        engine.core.state = dataclasses.replace(engine.core.state, proposer=table)


def find(scripts: list[Script], token_ids: list[int]) -> Script | None:
    return next((script for script in scripts if script.token_ids[: len(token_ids)] == token_ids), None)


@struct.dataclass
class ReplayTable:
    """Scripts on the device. known_NC: prompts and answers, -1 past their end; draft_NC: what to guess at a position,
    right or wrong; num_drafts_NC: how many at an anchor."""

    known_NC: jax.Array
    draft_NC: jax.Array
    num_drafts_NC: jax.Array


def make_table(scripts: list[Script], max_model_len: int) -> ReplayTable:
    known = np.full((MAX_KNOWN, max_model_len), -1, np.int32)
    draft, num_drafts = known.copy(), np.full_like(known, 2**20)
    for n, script in enumerate(scripts):
        known[n, : len(script.token_ids)] = script.token_ids
        draft[n, : len(script.token_ids)] = script.token_ids
        for position, guess in script.wrong.items():
            draft[n, position] = guess
        for anchor, count in script.num_drafts.items():
            num_drafts[n, anchor] = count
    return ReplayTable(known_NC=jnp.asarray(known), draft_NC=jnp.asarray(draft), num_drafts_NC=jnp.asarray(num_drafts))


def replay_proposer(num_tokens: int, max_model_len: int) -> Proposer:
    """Drafts from the scripts in its state, which tests set; a row that matches none drafts nothing."""

    def propose(weights, table: ReplayTable, view: RowView):
        del weights
        C = max_model_len
        is_past_BC = jnp.arange(C)[None, :] >= view.len_B[:, None]
        same_BNC = (view.history_BC[:, None] == table.known_NC[None]) | is_past_BC[:, None]
        fits_BN = jnp.all(same_BNC, axis=2)
        row_B, is_known_B = jnp.argmax(fits_BN, axis=1), jnp.any(fits_BN, axis=1)
        at_BK = view.len_B[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
        guess_BK = table.draft_NC[row_B[:, None], jnp.minimum(at_BK, C - 1)]
        is_told_BK = (at_BK < C) & (table.known_NC[row_B[:, None], jnp.minimum(at_BK, C - 1)] >= 0)
        wanted_B = table.num_drafts_NC[row_B, jnp.minimum(view.len_B, C - 1)]
        told_B = jnp.sum(is_told_BK.astype(jnp.int32), axis=1)
        counts_B = jnp.where(view.is_active_B & is_known_B, jnp.minimum(wanted_B, told_B), 0)
        guess_BK = jnp.where(jnp.arange(num_tokens)[None, :] < counts_B[:, None], guess_BK, -1)
        return Drafts(token_ids_BK=guess_BK, counts_B=counts_B), table

    def init(num_rows: int) -> ReplayTable:
        del num_rows
        return make_table([], max_model_len)

    return Proposer(num_tokens, init, lambda weights, state, rows_B, tokens, hidden_BTD: state, propose)


class HostReplay:
    """The same on the host. It also checks what it is told: committed tokens only, each request by its own id."""

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens
        self.scripts: list[Script] = []
        self.seen: dict[str, list[int]] = {}
        self.finished: list[str] = []

    def observe(self, request_id, prompt_token_ids, output_token_ids) -> None:
        now = [*prompt_token_ids, *output_token_ids]
        before = self.seen.get(request_id, now)
        assert now[: len(before)] == before, "committed tokens never change"
        self.seen[request_id] = now

    def propose(self, request_ids) -> list[list[int]]:
        guesses = []
        for request_id in request_ids:
            script = find(self.scripts, self.seen[request_id])
            anchor = len(self.seen[request_id])
            guesses.append(script.drafts(anchor, self.num_tokens) if script else [])
        return guesses

    def finish(self, request_id) -> None:
        self.finished.append(request_id)
        self.seen.pop(request_id, None)
