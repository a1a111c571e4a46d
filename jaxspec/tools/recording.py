"""Host. Runs of an engine of which every round is kept: with its drafter, and with drafts suppressed."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec.engine.build import EngineParts
from jaxspec.engine.core import EngineCore
from jaxspec.keys import request_key
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.proposers.base import Proposer, RowView
from jaxspec.sampling.params import SamplingParams
from jaxspec.step import rounds
from jaxspec.step.state import Batch, DecodeState, RoundOutput
from jaxspec.types import Drafts


@dataclass(frozen=True)
class Round:
    """One round of one answer. draft_token_ids: those judged; draft_logits_KV: what they were drawn from, or None."""

    token_ids: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    draft_token_ids: tuple[int, ...] | None = None
    draft_logits_KV: np.ndarray | None = None


@dataclass(frozen=True)
class Asked:
    """A prompt, which of the prompts it is, and the seed of the request."""

    prompt_index: int
    prompt: list[int]
    seed: int


@dataclass(frozen=True)
class Answer:
    """What was asked, the request's key (u32[2]), the ids of the answer, and the rounds they came from."""

    asked: Asked
    key: np.ndarray
    token_ids: list[int]
    rounds: list[Round]


class Recorder:
    """Runs requests through one idle engine, with its drafter or without, and keeps every round."""

    def __init__(self, core: EngineCore):
        """core: lends its state for each run and gets it back."""
        core.parts.check_one_device("jaxspec verify")
        self._core = core
        self._propose = functools.partial(_only_drafts, core.parts.proposer)
        self._plain = PlainPrograms(core.parts)

    def run(
        self,
        asked: Sequence[Asked],
        params: SamplingParams,
        stats: AcceptanceStats,
        *,
        keep_drafts: bool = False,
        bar: tqdm,
    ) -> list[Answer]:
        """Answer as the engine does, batched as it does.

        Args:
            stats: what acceptance is added to.
            keep_drafts: keep what each round guessed; costs a second drafting a round.
            bar: moved on by one an answer.
        """
        programs = RecordingPrograms(self._core.parts, self._propose if keep_drafts else None)
        return self._run(self._core.parts, programs, asked, params, stats, bar)

    def run_plain(self, asked: Sequence[Asked], params: SamplingParams, *, bar: tqdm) -> list[Answer]:
        """The same without drafts: plain decoding by the same weights, pages and rules."""
        parts = dataclasses.replace(self._core.parts, host_proposer=None)
        return self._run(parts, RecordingPrograms(parts, plain=self._plain), asked, params, AcceptanceStats(0), bar)

    def _run(
        self,
        parts: EngineParts,
        programs: "RecordingPrograms",
        asked: Sequence[Asked],
        params: SamplingParams,
        stats: AcceptanceStats,
        bar: tqdm,
    ) -> list[Answer]:
        core = EngineCore(dataclasses.replace(parts, programs=programs, state=self._core.state))  # pyright: ignore[reportArgumentType]
        try:
            requests = [
                core.add_request(
                    str(number), {"prompt_token_ids": one.prompt}, dataclasses.replace(params, seed=one.seed)
                )
                for number, one in enumerate(asked)
            ]
            num_done = 0
            while core.has_work:
                core.step()
                done = sum(request.is_finished for request in requests)
                bar.update(done - num_done)
                num_done = done
        finally:
            self._core.take_back(core.state)
        answers = []
        for one, request in zip(asked, requests, strict=True):
            (sequence,) = request.sequences
            stats.merge(sequence.stats)
            key = request_key(one.seed)
            answers.append(Answer(one, key, list(sequence.progress.token_ids), programs.rounds[tuple(key.tolist())]))
        return answers


class RecordingPrograms:
    """An engine's programs, one round a call; what comes out is kept by the request's key."""

    def __init__(
        self, parts: EngineParts, propose: Callable[..., Drafts] | None = None, plain: "PlainPrograms | None" = None
    ):
        """propose: what tells each round's drafts beforehand, if they are to be kept; plain: whose rounds to run."""
        self.shapes, self.spread = parts.programs.shapes, parts.programs.spread
        self.rounds: dict[tuple[int, ...], list[Round]] = {}
        self._programs: Any = parts.programs
        self._decode: Any = plain or parts.programs
        self._propose = propose
        self._row: dict[int, list[Round]] = {}

    def admit(self, state: DecodeState, admission: Any) -> DecodeState:
        key = tuple(np.asarray(admission.sampling.key_B2).tolist())
        self._row[int(admission.row)] = self.rounds.setdefault(key, [])
        return self._programs.admit(state, admission)

    def prefill(self, *args: Any) -> Any:
        return self._programs.prefill(*args)

    def prompt_logprobs(self, *args: Any) -> Any:
        return self._programs.prompt_logprobs(*args)

    def decode_rounds(self, weights: Any, state: DecodeState, batch: Batch, num_rounds: int):
        del num_rounds  # between two rounds of one call nobody could look
        # Drafting is a function of the state: what it says here is what the round is going to say.
        drafts = self._propose(weights, state, batch) if self._propose is not None else None
        state, output = self._decode.decode_rounds(weights, state, batch, 1)
        self._keep(batch, np.asarray(output.packed_BX)[0], drafts)
        return state, output

    def verify_commit(self, weights: Any, state: DecodeState, batch: Batch, drafts: Drafts):
        state, output = self._programs.verify_commit(weights, state, batch, drafts)
        self._keep(batch, np.asarray(output.packed_BX)[0], drafts)
        return state, output

    def _keep(self, batch: Batch, packed_BX: np.ndarray, drafts: Drafts | None) -> None:
        ids_BK = logits_BKV = None
        if drafts is not None:
            ids_BK = np.asarray(drafts.token_ids_BK)
            logits_BKV = None if drafts.logits_BKV is None else np.asarray(drafts.logits_BKV)
        for place, row in enumerate(np.asarray(batch.rows_B).tolist()):
            *token_ids, num_drafted, num_accepted = packed_BX[place].tolist()
            token_ids = tuple(token_id for token_id in token_ids if token_id >= 0)
            if row == self.shapes.guard_row or not token_ids:
                continue
            self._row[row].append(
                Round(
                    token_ids,
                    num_drafted,
                    num_accepted,
                    None if ids_BK is None else tuple(ids_BK[place, :num_drafted].tolist()),
                    None if logits_BKV is None else logits_BKV[place, :num_drafted].copy(),
                )
            )


class PlainPrograms:
    """The rounds of an engine without its drafts, compiled when first called: one position, or J if it is exact."""

    def __init__(self, parts: EngineParts):
        self._target = parts.target
        self._proposer = silent(parts.config.num_speculative_tokens if parts.config.exact else 0)

    def decode_rounds(
        self, weights: Any, state: DecodeState, batch: Batch, num_rounds: int
    ) -> tuple[DecodeState, RoundOutput]:
        return _decode_rounds(self._target, self._proposer, 1, weights, state, batch, np.int32(num_rounds))


_decode_rounds = jax.jit(rounds.decode_rounds, static_argnums=(0, 1, 2), donate_argnums=4)


@functools.cache
def silent(num_tokens: int) -> Proposer:
    """Guesses nothing, in as many places; another proposer's state passes through."""

    def propose(weights: Any, state: Any, view: RowView) -> tuple[Drafts, Any]:
        del weights
        rows = view.len_B.shape[0]
        nothing_BK = jnp.full((rows, num_tokens), -1, jnp.int32)
        return Drafts(token_ids_BK=nothing_BK, counts_B=jnp.zeros(rows, jnp.int32)), state

    return Proposer(num_tokens, lambda num_rows: (), lambda weights, state, *_: state, propose)


@functools.partial(jax.jit, static_argnums=0)
def _only_drafts(proposer: Proposer, weights: Any, state: DecodeState, batch: Batch) -> Drafts:
    return rounds.propose(proposer, weights, state, batch)[0]
