"""Host. What a caller gets back, in vLLM's shape."""

from dataclasses import dataclass, field
from typing import Any, Literal

from jaxspec.engine.commit import FinishReason


@dataclass(frozen=True)
class Logprob:
    """One token at one place. logprob: natural, or a logit (the engine's logprobs_mode); rank: 1 = the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None


TokenLogprobs = dict[int, Logprob]  # the token of the place first, then the likeliest; by token id


# Where a token of an answer came from: a draft that was kept; the target, in place of one that was not; the target,
# after all drafts were kept; or a round without drafts.
TokenOrigin = Literal["accepted", "recovered", "bonus", "plain"]


@dataclass(frozen=True)
class TokenPiece:
    """One token of an answer. text: what became certain with it; half a character comes with the token that ends it."""

    token_id: int
    text: str
    origin: TokenOrigin


@dataclass(frozen=True)
class CompletionOutput:
    """One answer of a request.

    text, token_ids: all of it so far; text_delta, token_ids_delta: what is new since the previous output of this
    request; pieces_delta: the same token by token. logprobs: one entry a token, None where not asked for;
    cumulative_logprob: the sum over the tokens.
    finish_reason: "stop", "length", "abort", or None while it runs; stop_reason: the stop id or string hit.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text_delta: str = ""
    token_ids_delta: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    pieces_delta: list[TokenPiece] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds on `time.monotonic`'s clock; speculative_decoding as vLLM's object of that name.

    first_scheduled_time: when it was given a row, None while it waits for its first.
    """

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    speculative_decoding: dict[str, Any]
    first_scheduled_time: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request's state: finished when every one of its `n` answers is.

    prompt_logprobs: one entry a prompt token, the first None; None where not asked for. num_cached_tokens: tokens of
    the prompt that the cache held when the request (of several answers the first) began; None while it waits.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None
