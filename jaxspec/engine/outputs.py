"""Host. What a caller gets back, in vLLM's shape."""

from dataclasses import dataclass, field
from typing import Any

from jaxspec.engine.commit import FinishReason


@dataclass(frozen=True)
class CompletionOutput:
    """One answer of a request.

    text, token_ids: all of it so far; text_delta, token_ids_delta: what is new since the previous output of this
    request. finish_reason: "stop", "length", "abort", or None while it runs; stop_reason: the stop id or string hit.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text_delta: str = ""
    token_ids_delta: list[int] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds on `time.monotonic`'s clock; speculative_decoding as vLLM's object of that name."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    speculative_decoding: dict[str, Any]


@dataclass(frozen=True)
class RequestOutput:
    """A request's state: finished when every one of its `n` answers is."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
