"""Host. Outputs as OpenAI's JSON, whole or in chunks: texts, calls, reasons, usage, and how speculation went."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspec.engine.outputs import CompletionOutput, TokenLogprobs, TokenPiece
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.serve.errors import error_body
from jaxspec.serve.generate import new_id
from jaxspec.serve.logprobs import Scored, chat_logprobs, completion_logprobs, prompt_logprobs
from jaxspec.text.answer_parts import AnswerParser, Parts

_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # made once: `json.dumps` makes one a call


@dataclass(frozen=True)
class Echo:
    """A prompt that stands before its answers. first: the text of its first token, which nothing scores."""

    text: str
    first: str


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """What every part of one answer repeats, and how its parts are to look.

    is_chat chooses between OpenAI's two shapes; num_logprobs: the likeliest tokens to show beside each, None for no
    log-probabilities at all; echoes: one a prompt, or none; is_echo_alone: no token of the answers is shown;
    new_parser: makes what tells a chat's content from calls and reasoning, one an answer.
    """

    model: str
    is_chat: bool
    num_choices_per_prompt: int
    prompt_lens: tuple[int, ...]
    num_logprobs: int | None = None
    echoes: tuple[Echo, ...] = ()
    is_echo_alone: bool = False
    returns_origins: bool = False
    new_parser: Callable[[], AnswerParser] = AnswerParser
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self):
        if not self.id:
            object.__setattr__(self, "id", new_id("chatcmpl" if self.is_chat else "cmpl"))

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
        if not self.is_chat:
            body: dict[str, Any] = {"text": piece.text}
        elif is_chunk:
            body = {"delta": _delta(piece)}
        else:
            body = {"message": _message(piece)}
        logprobs = None
        if self.num_logprobs is not None:
            logprobs = (
                chat_logprobs([entry for entry in piece.logprobs if not isinstance(entry, str)], self.num_logprobs)
                if self.is_chat
                else completion_logprobs(piece.logprobs, self.num_logprobs, piece.offset)
            )
        reason = piece.finish_reason
        if reason == "stop" and piece.calls_tools:
            reason = "tool_calls"
        choice = {"index": index} | body
        choice |= {"logprobs": logprobs, "finish_reason": reason, "stop_reason": piece.stop_reason}
        if self.returns_origins:
            choice["tokens"] = [
                {"id": token.token_id, "text": token.text, "origin": token.origin} for token in piece.tokens
            ]
        return choice

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
    parts: Parts = field(default_factory=Parts)  # the text told apart; of a completion all is content
    calls_tools: bool = False  # this piece or an earlier one of its choice
    call_ids: dict[int, str] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Scored] = field(default_factory=list)
    tokens: list[TokenPiece] = field(default_factory=list)
    offset: int = 0

    @property
    def says_something(self) -> bool:
        """Whether a stream has to show it."""
        return bool(self.parts or self.logprobs or self.finish_reason)


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
        self._parsers = [self.envelope.new_parser() for _ in self.choices] if self.envelope.is_chat else []
        self._to_echo = set(range(self.envelope.num_choices)) if self.envelope.echoes else set()

    def add(self, prompt_index: int, output: Any, *, by_token: bool = False) -> list[tuple[int, Piece]]:
        """Take one output in; returns what it brought, by the choice's index; by_token: a piece for each token."""
        brought = []
        for completion in output.outputs:
            index = prompt_index * self.envelope.num_choices_per_prompt + completion.index
            pieces = [self._echo(prompt_index, output)] if index in self._to_echo else []
            self._to_echo.discard(index)
            pieces += self._pieces(completion, by_token)
            for piece in pieces:
                self._take(index, piece)
            if by_token:
                brought += [(index, piece) for piece in pieces if piece.says_something or piece.tokens]
            else:
                joined = _joined(pieces)
                if joined.says_something or (joined.tokens and self.envelope.returns_origins):
                    brought.append((index, joined))
        if output.finished:
            self.num_cached_tokens += output.num_cached_tokens or 0
            self._add_acceptance(getattr(output.metrics, "speculative_decoding", None))
            if output.prompt_logprobs is not None:
                self.prompt_logprobs[prompt_index] = output.prompt_logprobs
        return brought

    def _echo(self, prompt_index: int, output: Any) -> Piece:
        echo = self.envelope.echoes[prompt_index]
        entries = output.prompt_logprobs or []
        return Piece(echo.text, logprobs=[echo.first if entry is None else entry for entry in entries])

    def _pieces(self, completion: CompletionOutput, by_token: bool) -> list[Piece]:
        """What the engine's output brought of one answer, in one piece or one a token."""
        if self.envelope.is_echo_alone:
            return [Piece(finish_reason="length")] if completion.is_finished else []
        tokens = completion.pieces_delta
        new_logprobs = [] if completion.logprobs is None else completion.logprobs[-len(tokens) :] if tokens else []
        if by_token and tokens:
            logprobs: list[list[TokenLogprobs]] = [[one] for one in new_logprobs] or [[] for _ in tokens]
            pieces = [
                Piece(token.text, tokens=[token], logprobs=list(one))
                for token, one in zip(tokens, logprobs, strict=True)
            ]
        else:
            pieces = [Piece(completion.text_delta, tokens=list(tokens), logprobs=list(new_logprobs))]
        pieces[-1].finish_reason, pieces[-1].stop_reason = completion.finish_reason, completion.stop_reason
        return pieces

    def _take(self, index: int, piece: Piece) -> None:
        """Join a piece to its choice, telling it what depends on earlier ones."""
        whole = self.choices[index]
        self.num_completion_tokens += len(piece.tokens)
        piece.offset = whole.offset
        if whole.finish_reason is not None:  # an answer ends once, though its request goes on with others
            piece.finish_reason = piece.stop_reason = None
        if not self._parsers:
            piece.parts = Parts(piece.text)
        else:
            piece.parts = self._parsers[index].push(piece.text)
            if piece.finish_reason is not None:
                piece.parts.add(self._parsers[index].flush())
            for call in piece.parts.calls:
                piece.call_ids[call] = whole.call_ids.setdefault(call, f"call_{uuid.uuid4().hex[:24]}")
        piece.calls_tools = whole.calls_tools = whole.calls_tools or bool(piece.parts.calls)
        whole.parts.add(piece.parts)
        whole.text += piece.text
        whole.tokens += piece.tokens
        whole.logprobs += piece.logprobs
        whole.offset += sum(len(_text_of(entry)) for entry in piece.logprobs)
        if piece.finish_reason is not None:
            whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason

    def whole_choices(self) -> list[dict[str, Any]]:
        """Every choice as it ended; a completion's also with its prompt's log-probabilities, where asked for."""
        choices = []
        for index, piece in enumerate(self.choices):
            piece.offset = 0
            choice = self.envelope.choice(index, piece, is_chunk=False)
            entries = self.prompt_logprobs.get(index // self.envelope.num_choices_per_prompt)
            if entries is not None and not self.envelope.is_chat and not self.envelope.echoes:
                choice["prompt_logprobs"] = prompt_logprobs(entries)
            choices.append(choice)
        return choices

    def _add_acceptance(self, figures: dict[str, Any] | None) -> None:
        if figures is not None and figures["num_spec_tokens"] and not self.envelope.is_echo_alone:
            stats = AcceptanceStats.from_dict(figures)
            if self.acceptance is not None:
                stats.merge(self.acceptance)
            self.acceptance = stats

    def usage(self) -> dict[str, int]:
        """Tokens so far."""
        return self.envelope.usage(self.num_completion_tokens)

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
    envelope: Envelope,
    first: list[tuple[int, Any]],
    rest: AsyncIterator[tuple[int, Any]],
    *,
    includes_usage: bool = False,
    continuous_usage: bool = False,
    by_token: bool = False,
) -> AsyncIterator[str]:
    """The response as server-sent events, a chunk as text comes, ending in [DONE]. An error becomes an event too.

    Outputs are those of first, already taken, and then the rest. by_token: a chunk for each token.
    """
    tally = Tally(envelope)
    opened: set[int] = set()

    def chunk(choice: dict[str, Any]) -> str:
        usage = {"usage": tally.usage()} if continuous_usage else {"usage": None} if includes_usage else {}
        return _event(envelope.around([choice], is_chunk=True) | usage)

    try:
        async for prompt_index, output in _chain(first, rest):
            for index, piece in tally.add(prompt_index, output, by_token=by_token):
                if envelope.is_chat and index not in opened:
                    opened.add(index)
                    opening = envelope.choice(index, Piece(), is_chunk=True) | {"logprobs": None}
                    opening["delta"] = {"role": "assistant", "content": ""}
                    yield chunk(opening)
                yield chunk(envelope.choice(index, piece, is_chunk=True))
        if includes_usage:
            yield _event(envelope.around([], is_chunk=True) | tally.totals())
    except Exception as error:
        yield _event(error_body(error)[1])
    yield "data: [DONE]\n\n"


def _joined(pieces: Sequence[Piece]) -> Piece:
    """Pieces of one choice that came together as one."""
    if len(pieces) == 1:
        return pieces[0]
    joined = Piece(offset=pieces[0].offset if pieces else 0)
    for piece in pieces:
        joined.text += piece.text
        joined.parts.add(piece.parts)
        joined.calls_tools |= piece.calls_tools
        joined.call_ids |= piece.call_ids
        joined.logprobs += piece.logprobs
        joined.tokens += piece.tokens
        joined.finish_reason = joined.finish_reason or piece.finish_reason
        joined.stop_reason = joined.stop_reason or piece.stop_reason
    return joined


def _message(piece: Piece) -> dict[str, Any]:
    """A chat's answer as it ended: content is null where there are calls alone."""
    parts = piece.parts
    message: dict[str, Any] = {"role": "assistant", "content": parts.content}
    if parts.reasoning:
        message["reasoning_content"] = parts.reasoning
    if parts.calls:
        message["content"] = parts.content or None
        message["tool_calls"] = [
            _call(piece, index) | {"function": {"name": call.name, "arguments": call.arguments}}
            for index, call in sorted(parts.calls.items())
        ]
    return message


def _delta(piece: Piece) -> dict[str, Any]:
    """What is new of a chat's answer; a call has its id and name with its first part alone."""
    parts = piece.parts
    delta: dict[str, Any] = {}
    if parts.reasoning:
        delta["reasoning_content"] = parts.reasoning
    if parts.calls:
        delta["tool_calls"] = [
            {"index": index}
            | (
                _call(piece, index) | {"function": {"name": call.name, "arguments": call.arguments}}
                if call.name is not None
                else {"function": {"arguments": call.arguments}}
            )
            for index, call in sorted(parts.calls.items())
        ]
    if parts.content or not delta:
        delta["content"] = parts.content
    return delta


def _call(piece: Piece, index: int) -> dict[str, Any]:
    return {"id": piece.call_ids[index], "type": "function"}


def _text_of(entry: Scored) -> str:
    return entry if isinstance(entry, str) else next(iter(entry.values())).decoded_token or ""


async def _chain(first: list[tuple[int, Any]], rest: AsyncIterator[tuple[int, Any]]) -> AsyncIterator[tuple[int, Any]]:
    for item in first:
        yield item
    async for item in rest:
        yield item


def _event(body: dict[str, Any]) -> str:
    return f"data: {_ENCODER.encode(body)}\n\n"
