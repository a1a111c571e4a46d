"""Host. A request and its n sequences, from checked input to output."""

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxspec.engine.commit import Cut, Progress, commit_block
from jaxspec.engine.host_edits import HostEdits
from jaxspec.engine.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    TokenOrigin,
    TokenPiece,
)
from jaxspec.errors import RequestError
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.sampling.params import SamplingParams
from jaxspec.scheduler.request import SequenceState

Prompt = str | dict[str, Any]


@dataclass(eq=False)
class Sequence:
    """One of a request's n answers: where it stands in the schedule, and what it has said."""

    index: int
    state: SequenceState
    progress: Progress
    key: np.ndarray  # uint32[2]
    stats: AcceptanceStats
    host_edits: HostEdits = field(default_factory=HostEdits)
    logprobs: list[TokenLogprobs] | None = None  # one a token of the answer, where asked for
    pieces_delta: list[TokenPiece] = field(default_factory=list)
    was_prefilled: bool = False  # once; a sequence that lost its pages is prefilled again
    last_token_time: float | None = None

    @property
    def is_finished(self) -> bool:
        return self.progress.finish_reason is not None

    @property
    def cumulative_logprob(self) -> float | None:
        """The answer's own; None where log-probabilities were not asked for."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for entry, token in zip(self.logprobs, self.progress.token_ids, strict=True))

    def commit(
        self,
        token_ids: SequenceOf[int],
        num_drafted: int,
        num_accepted: int,
        logprobs: SequenceOf[TokenLogprobs] = (),
    ) -> Cut:
        """Take one round's block; logprobs: one a token, if the request wants them."""
        cut = commit_block(self.progress, token_ids)
        if self.logprobs is not None:
            self.logprobs.extend(logprobs[: len(cut.token_ids)])
        self.stats.observe(num_drafted, num_accepted, len(cut.token_ids))
        last: TokenOrigin = "plain" if num_drafted == 0 else "bonus" if num_accepted == num_drafted else "recovered"
        for place, (token_id, text) in enumerate(zip(cut.token_ids, cut.texts, strict=True)):
            self.pieces_delta.append(TokenPiece(token_id, text, "accepted" if place < num_accepted else last))
        return cut

    @property
    def token_ids_delta(self) -> list[int]:
        """What is new since the request's last output."""
        return [piece.token_id for piece in self.pieces_delta]


@dataclass(eq=False)
class Request:
    """A request in flight."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sequences: list[Sequence]
    arrival_time: float = field(default_factory=time.monotonic)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    error: Exception | None = None  # what ended it, if its own code failed
    priority: int = 0
    cache_salt: str | None = None

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """The request as a caller sees it; what the deltas hold is new since the last call."""
        stats = AcceptanceStats(self.sequences[0].stats.num_spec_tokens)
        outputs = []
        for sequence in self.sequences:
            stats.merge(sequence.stats)
            progress = sequence.progress
            outputs.append(
                CompletionOutput(
                    index=sequence.index,
                    text=progress.text,
                    token_ids=list(progress.token_ids),
                    finish_reason=progress.finish_reason,
                    stop_reason=progress.stop_reason,
                    text_delta="".join(piece.text for piece in sequence.pieces_delta),
                    token_ids_delta=sequence.token_ids_delta,
                    logprobs=None if sequence.logprobs is None else list(sequence.logprobs),
                    cumulative_logprob=sequence.cumulative_logprob,
                    pieces_delta=sequence.pieces_delta,
                )
            )
            sequence.pieces_delta = []
        metrics = RequestMetrics(
            self.arrival_time, self.first_token_time, self.finished_time, stats.as_dict(), self.first_scheduled_time
        )
        return RequestOutput(
            self.request_id,
            self.prompt,
            list(self.prompt_token_ids),
            outputs,
            self.is_finished,
            metrics,
            self.prompt_logprobs,
            self.sequences[0].state.num_cached_tokens,
        )


def check_prompt_token_ids(token_ids: Any, *, vocab_size: int, max_model_len: int) -> list[int]:
    """Token ids as the engine needs them.

    Raises:
        RequestError: not a list of ids of the vocabulary, none at all, or no room for even one token of an answer.
    """
    if not isinstance(token_ids, (list, tuple)) and not (isinstance(token_ids, np.ndarray) and token_ids.ndim == 1):
        raise RequestError(f"prompt_token_ids must be a list of token ids, got {token_ids!r:.100}", param="prompt")
    if len(token_ids) == 0:
        raise RequestError(
            "a prompt must hold at least one token; an empty one has nothing to continue", param="prompt"
        )
    ids = []
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, (int, np.integer)):
            raise RequestError(f"prompt_token_ids must be integers, got {token_id!r}", param="prompt")
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"prompt token {token_id} is outside the vocabulary [0, {vocab_size})", param="prompt")
        ids.append(int(token_id))
    if len(ids) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and must leave room for one more within max_model_len={max_model_len}; "
            "shorten it or raise max_model_len",
            param="prompt",
        )
    return ids
