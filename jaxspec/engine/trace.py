"""Host. One request, round by round, with everything a researcher of drafting asks for."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxspec.engine.build import EngineParts
from jaxspec.engine.core import EngineCore
from jaxspec.engine.request import Prompt
from jaxspec.errors import RequestError
from jaxspec.sampling.params import SamplingParams
from jaxspec.step import rounds
from jaxspec.step.programs import stacked
from jaxspec.step.state import Batch, DecodeState, RoundOutput
from jaxspec.types import Drafts

Origin = Literal["accepted", "recovered", "bonus"]


@dataclass(frozen=True)
class RoundTrace:
    """One decode round of one sequence.

    anchor: tokens committed when it began. draft_token_ids: what was guessed. target_logits_JV: float32, row j judges
    draft j, the last row used gives the bonus; as the model gave them, before any sampling parameter.
    draft_logits_KV: what the drafts were drawn from, None for a point mass.
    token_ids: what was committed; origins: where each came from.
    """

    anchor: int
    draft_token_ids: tuple[int, ...]
    target_logits_JV: np.ndarray
    draft_logits_KV: np.ndarray | None
    num_accepted: int
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]


def trace_request(
    core: EngineCore, programs: "TracingPrograms", prompt: Prompt, params: SamplingParams
) -> list[RoundTrace]:
    """Run one prompt to its end through the two halves of a round, keeping what lies between them.

    Args:
        core: idle; programs: made once of its parts, since they keep what they compiled.

    Raises:
        RequestError: the prompt is refused, asks for more than one answer, or other requests are running.
    """
    if params.n != 1:
        raise RequestError(f"trace follows one answer, got n={params.n}; ask for one", param="n")
    if core.has_work:
        raise RequestError("trace needs the engine to itself; finish or abort the running requests")
    programs.rounds = []
    # The traced core borrows the only state there is, and hands it back.
    config = core.config.model_copy(update={"async_scheduling": False})  # a round is kept when it is read
    borrower = EngineCore(dataclasses.replace(core.parts, config=config, programs=programs, state=core.state))
    try:
        request = borrower.add_request("trace", prompt, params)
        while not request.is_finished:
            borrower.step()
    finally:
        core.take_back(borrower.state)
    return programs.rounds


class TracingPrograms:
    """The engine's programs with the round taken apart; compiled when first called, since no plan holds them."""

    def __init__(self, parts: EngineParts):
        self.shapes, self.spread = parts.programs.shapes, parts.programs.spread
        self.admit, self.prefill = parts.programs.admit, parts.programs.prefill
        self.prompt_logprobs = parts.programs.prompt_logprobs
        self.rounds: list[RoundTrace] = []
        self._vocab_size = parts.target.config.vocab_size
        jit = parts.programs.spread.jit
        self.propose = jit(
            functools.partial(rounds.propose, parts.proposer),
            ("weights", "state", "small"),
            ("drafts", "state"),
            donate=1,
        )
        self.forward = jit(
            functools.partial(rounds.forward, parts.target, parts.proposer),
            ("weights", "state", "small", "drafts"),
            ("state", "logits", "held"),
            donate=1,
        )
        self._judge_commit = jit(
            stacked(functools.partial(rounds.judge_commit, parts.target, parts.proposer)),
            ("state", "small", "drafts", "logits", "held", "small"),
            ("state", "small"),
            donate=0,
        )

    def decode_rounds(self, weights: Any, state: DecodeState, batch: Batch, num_rounds: int):
        del num_rounds
        drafts, state = self.propose(weights, state, batch)
        return self.verify_commit(weights, state, batch, drafts)

    def verify_commit(self, weights: Any, state: DecodeState, batch: Batch, drafts: Drafts):
        state, logits_BJV, seen_BJX = self.forward(weights, state, batch, drafts)
        return self.judge_commit(state, batch, drafts, logits_BJV, seen_BJX)

    def judge_commit(
        self,
        state: DecodeState,
        batch: Batch,
        drafts: Drafts,
        logits_BJV: Any,
        seen_BJX: Any,
        mask_BJU: np.ndarray | None = None,
    ) -> tuple[DecodeState, RoundOutput]:
        """The engine's own, with its round kept: of a request that is alone, and so in the first group."""
        len_R, rows_B = self.spread.part((state.len_R, batch.rows_B), 0)
        anchor = int(np.asarray(len_R)[rows_B[0]])
        state, output = self._judge_commit(state, batch, drafts, logits_BJV, seen_BJX, mask_BJU)
        packed_1BX, drafts, logits_BJV = self.spread.part((output.packed_BX, drafts, logits_BJV), 0)
        *token_ids, num_drafted, num_accepted = np.asarray(packed_1BX)[0, 0].tolist()
        token_ids = tuple(token_id for token_id in token_ids if token_id >= 0)
        last: Origin = "bonus" if num_accepted == num_drafted else "recovered"
        self.rounds.append(
            RoundTrace(
                anchor=anchor,
                draft_token_ids=tuple(np.asarray(drafts.token_ids_BK)[0, :num_drafted].tolist()),
                target_logits_JV=np.asarray(logits_BJV)[0, : num_drafted + 1, : self._vocab_size],
                draft_logits_KV=(
                    None
                    if drafts.logits_BKV is None
                    else np.asarray(drafts.logits_BKV)[0, :num_drafted, : self._vocab_size]
                ),
                num_accepted=num_accepted,
                token_ids=token_ids,
                origins=(("accepted",) * num_accepted + (last,))[: len(token_ids)],
            )
        )
        return state, output
