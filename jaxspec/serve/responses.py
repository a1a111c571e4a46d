"""Host. Outputs as OpenAI's JSON, whole or in chunks: texts, reasons, usage, and how speculation went."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from jaxspec.engine.outputs import TokenLogprobs
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.serve.errors import error_body
from jaxspec.serve.generate import new_id
from jaxspec.serve.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs


@dataclass(frozen=True)
class Envelope:
    """What every part of one answer repeats. is_chat chooses between OpenAI's two shapes; num_logprobs: the likeliest
    tokens to show beside each, None for no log-probabilities at all."""

    model: str
    is_chat: bool
    num_choices_per_prompt: int
    prompt_lens: tuple[int, ...]
    num_logprobs: int | None
    id: str
    created: int

    @classmethod
    def new(
        cls,
        model: str,
        is_chat: bool,
        num_choices_per_prompt: int,
        prompt_lens: tuple[int, ...],
        num_logprobs: int | None = None,
    ) -> "Envelope":
        """The envelope of an answer that starts now."""
        response_id = new_id("chatcmpl" if is_chat else "cmpl")
        return cls(model, is_chat, num_choices_per_prompt, prompt_lens, num_logprobs, response_id, int(time.time()))

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

    def choice(self, index: int, piece: "Piece", *, is_chunk: bool) -> dict[str, Any]:
        """One choice, or the next piece of it."""
        text = piece.text
        if not self.is_chat:
            body: dict[str, Any] = {"text": text}
        elif is_chunk:
            body = {"delta": {"content": text}}
        else:
            body = {"message": {"role": "assistant", "content": text}}
        logprobs = None
        if self.num_logprobs is not None:
            logprobs = (
                chat_logprobs(piece.logprobs, self.num_logprobs)
                if self.is_chat
                else completion_logprobs(piece.logprobs, self.num_logprobs, piece.offset)
            )
        reasons = {"logprobs": logprobs, "finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        return {"index": index} | body | reasons

    def usage(self, num_completion_tokens: int, num_cached_tokens: int = 0) -> dict[str, Any]:
        """Tokens read and written; a prompt counts once, however many choices it has. num_cached_tokens: those of the
        prompts that the cache held."""
        num_prompt_tokens = sum(self.prompt_lens)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        }


@dataclass
class Piece:
    """What an output brought of one choice, or all of it. offset: characters of earlier pieces' tokens."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offset: int = 0


@dataclass
class Tally:
    """What accumulates while outputs come: each choice as far as it is, tokens, and acceptance."""

    envelope: Envelope
    choices: list[Piece] = field(init=False)
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)  # by prompt
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    acceptance: AcceptanceStats | None = None

    def __post_init__(self):
        self.choices = [Piece() for _ in range(self.envelope.num_choices)]

    def add(self, prompt_index: int, output: Any) -> list[tuple[int, Piece]]:
        """Take one output in; returns what it brought, by the choice's index."""
        brought = []
        for completion in output.outputs:
            index = prompt_index * self.envelope.num_choices_per_prompt + completion.index
            whole = self.choices[index]
            num_new = len(completion.token_ids_delta)
            self.num_completion_tokens += num_new
            new = Piece(completion.text_delta, offset=whole.offset)
            if completion.logprobs is not None:
                new.logprobs = completion.logprobs[len(completion.logprobs) - num_new :]
                whole.logprobs += new.logprobs
                whole.offset += sum(len(next(iter(entry.values())).decoded_token or "") for entry in new.logprobs)
            whole.text += new.text
            if completion.finish_reason is not None and whole.finish_reason is None:
                whole.finish_reason, whole.stop_reason = completion.finish_reason, completion.stop_reason
                new.finish_reason, new.stop_reason = completion.finish_reason, completion.stop_reason
            if new.text or new.logprobs or new.finish_reason is not None:
                brought.append((index, new))
        if output.finished:
            self.num_cached_tokens += output.num_cached_tokens or 0
            self._add_acceptance(getattr(output.metrics, "speculative_decoding", None))
            if output.prompt_logprobs is not None:
                self.prompt_logprobs[prompt_index] = output.prompt_logprobs
        return brought

    def whole_choices(self) -> list[dict[str, Any]]:
        """Every choice as it ended; a completion's also with its prompt's log-probabilities, where asked for."""
        choices = []
        for index, piece in enumerate(self.choices):
            piece.offset = 0
            choice = self.envelope.choice(index, piece, is_chunk=False)
            entries = self.prompt_logprobs.get(index // self.envelope.num_choices_per_prompt)
            if entries is not None and not self.envelope.is_chat:
                choice["prompt_logprobs"] = prompt_logprobs(entries)
            choices.append(choice)
        return choices

    def _add_acceptance(self, figures: dict[str, Any] | None) -> None:
        if figures is not None and figures["num_spec_tokens"]:
            stats = AcceptanceStats.from_dict(figures)
            if self.acceptance is not None:
                stats.merge(self.acceptance)
            self.acceptance = stats

    def totals(self) -> dict[str, Any]:
        """Usage, and how speculation went where it ran."""
        metrics = {"speculative_decoding": self.acceptance.as_dict()} if self.acceptance else None
        usage = self.envelope.usage(self.num_completion_tokens, self.num_cached_tokens)
        return {"usage": usage, "metrics": metrics}

    def chat_prompt_logprobs(self) -> dict[str, Any]:
        """A chat's own field, where asked for."""
        if not self.envelope.is_chat or 0 not in self.prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self.prompt_logprobs[0])}


async def whole(envelope: Envelope, outputs: AsyncIterator[tuple[int, Any]]) -> dict[str, Any]:
    """The response once every choice has ended."""
    tally = Tally(envelope)
    async for prompt_index, output in outputs:
        tally.add(prompt_index, output)
    return envelope.around(tally.whole_choices(), is_chunk=False) | tally.chat_prompt_logprobs() | tally.totals()


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
            for index, piece in tally.add(prompt_index, output):
                if envelope.is_chat and index not in opened:
                    opened.add(index)
                    opening = envelope.choice(index, Piece(), is_chunk=True) | {"logprobs": None}
                    opening["delta"] = {"role": "assistant", "content": ""}
                    yield _event(envelope.around([opening], is_chunk=True) | unfinished)
                choice = envelope.choice(index, piece, is_chunk=True)
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
