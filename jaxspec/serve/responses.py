"""Host. Outputs as OpenAI's JSON, whole or in chunks: texts, reasons, usage, and how speculation went."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.serve.errors import error_body
from jaxspec.serve.generate import new_id


@dataclass(frozen=True)
class Envelope:
    """What every part of one answer repeats. is_chat chooses between OpenAI's two shapes."""

    model: str
    is_chat: bool
    num_choices_per_prompt: int
    prompt_lens: tuple[int, ...]
    id: str
    created: int

    @classmethod
    def new(cls, model: str, is_chat: bool, num_choices_per_prompt: int, prompt_lens: tuple[int, ...]) -> "Envelope":
        """The envelope of an answer that starts now."""
        response_id = new_id("chatcmpl" if is_chat else "cmpl")
        return cls(model, is_chat, num_choices_per_prompt, prompt_lens, response_id, int(time.time()))

    @property
    def num_choices(self) -> int:
        """Choices of all prompts together."""
        return len(self.prompt_lens) * self.num_choices_per_prompt

    def around(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        """A response, or one chunk of it."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        if self.is_chat and is_chunk:
            kind = "chat.completion.chunk"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def choice(
        self, index: int, text: str, finish_reason: str | None, stop_reason: int | str | None, *, is_chunk: bool
    ) -> dict[str, Any]:
        """One choice, or the next piece of it."""
        if not self.is_chat:
            body: dict[str, Any] = {"text": text}
        elif is_chunk:
            body = {"delta": {"content": text}}
        else:
            body = {"message": {"role": "assistant", "content": text}}
        reasons = {"logprobs": None, "finish_reason": finish_reason, "stop_reason": stop_reason}
        return {"index": index} | body | reasons

    def usage(self, num_completion_tokens: int) -> dict[str, int]:
        """Tokens read and written; a prompt counts once, however many choices it has."""
        num_prompt_tokens = sum(self.prompt_lens)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
        }


@dataclass
class Tally:
    """What accumulates while outputs come: each choice's text and reasons, tokens, and acceptance."""

    envelope: Envelope
    texts: list[str] = field(init=False)
    reasons: list[tuple[str | None, int | str | None]] = field(init=False)
    num_completion_tokens: int = 0
    acceptance: AcceptanceStats | None = None

    def __post_init__(self):
        self.texts = [""] * self.envelope.num_choices
        self.reasons = [(None, None)] * self.envelope.num_choices

    def add(self, prompt_index: int, output: Any) -> list[tuple[int, str, str | None, int | str | None]]:
        """Take one output in; returns what it brought: (choice's index, new text, finish reason, stop reason)."""
        brought = []
        for completion in output.outputs:
            index = prompt_index * self.envelope.num_choices_per_prompt + completion.index
            self.num_completion_tokens += len(completion.token_ids_delta)
            self.texts[index] += completion.text_delta
            ended_now = completion.finish_reason is not None and self.reasons[index][0] is None
            if ended_now:
                self.reasons[index] = (completion.finish_reason, completion.stop_reason)
            if completion.text_delta or ended_now:
                brought.append((index, completion.text_delta, *(self.reasons[index] if ended_now else (None, None))))
        if output.finished:
            self._add_acceptance(getattr(output.metrics, "speculative_decoding", None))
        return brought

    def _add_acceptance(self, figures: dict[str, Any] | None) -> None:
        if figures is not None and figures["num_spec_tokens"]:
            stats = AcceptanceStats.from_dict(figures)
            if self.acceptance is not None:
                stats.merge(self.acceptance)
            self.acceptance = stats

    def totals(self) -> dict[str, Any]:
        """Usage, and how speculation went where it ran."""
        metrics = {"speculative_decoding": self.acceptance.as_dict()} if self.acceptance else None
        return {"usage": self.envelope.usage(self.num_completion_tokens), "metrics": metrics}


async def whole(envelope: Envelope, outputs: AsyncIterator[tuple[int, Any]]) -> dict[str, Any]:
    """The response once every choice has ended."""
    tally = Tally(envelope)
    async for prompt_index, output in outputs:
        tally.add(prompt_index, output)
    choices = [
        envelope.choice(index, text, *reasons, is_chunk=False)
        for index, (text, reasons) in enumerate(zip(tally.texts, tally.reasons, strict=True))
    ]
    return envelope.around(choices, is_chunk=False) | tally.totals()


async def events(
    envelope: Envelope, first: list[tuple[int, Any]], rest: AsyncIterator[tuple[int, Any]], *, includes_usage: bool
) -> AsyncIterator[str]:
    """The response as server-sent events, a chunk as text comes, ending in [DONE]. An error becomes an event too.

    Outputs are those of first, already taken, and then the rest.
    """
    tally = Tally(envelope)
    unfinished = {"usage": None} if includes_usage else {}
    opened: set[int] = set()
    try:
        async for prompt_index, output in _chain(first, rest):
            for index, text, finish_reason, stop_reason in tally.add(prompt_index, output):
                if envelope.is_chat and index not in opened:
                    opened.add(index)
                    opening = envelope.choice(index, "", None, None, is_chunk=True)
                    opening["delta"] = {"role": "assistant", "content": ""}
                    yield _event(envelope.around([opening], is_chunk=True) | unfinished)
                choice = envelope.choice(index, text, finish_reason, stop_reason, is_chunk=True)
                yield _event(envelope.around([choice], is_chunk=True) | unfinished)
        if includes_usage:
            yield _event(envelope.around([], is_chunk=True) | tally.totals())
    except Exception as error:
        yield _event(error_body(error)[1])
    yield "data: [DONE]\n\n"


async def _chain(first: list[tuple[int, Any]], rest: AsyncIterator[tuple[int, Any]]) -> AsyncIterator[tuple[int, Any]]:
    for item in first:
        yield item
    async for item in rest:
        yield item


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, allow_nan=False, separators=(',', ':'))}\n\n"
