"""Host. What an answer's text holds: content, reasoning and tool calls, told apart as it comes.

Every parser here gives out what is certain of the text so far, so that what it has given out in the end does not
depend on how the text came in pieces: in blocks of one token or of nine, streamed or whole.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from jaxspec.text.call_scanner import CallScanner

THINK, END_THINK = "<think>", "</think>"
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


@dataclass
class CallPart:
    """What is new of one tool call. name: set once, with its first part."""

    name: str | None = None
    arguments: str = ""


@dataclass
class Parts:
    """What is new of an answer; calls by their index."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, CallPart] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def add(self, more: "Parts") -> None:
        """Join what came later."""
        self.content += more.content
        self.reasoning += more.reasoning
        for index, part in more.calls.items():
            call = self.calls.setdefault(index, CallPart())
            call.name = call.name or part.name
            call.arguments += part.arguments


class CallParser(Protocol):
    """Tells tool calls from content. push takes more text, flush its end; both say what is certain now."""

    def push(self, text: str) -> Parts: ...

    def flush(self) -> Parts: ...


class AnswerParser:
    """One answer's text as its parts: reasoning first, where the model reasons, then content and tool calls."""

    def __init__(self, calls: CallParser | None = None, reasoning: "ReasoningSplitter | None" = None):
        """calls: None where no tool may be called; reasoning: None where all text is content."""
        self._calls = calls or _NoCalls()
        self._reasoning = reasoning

    def push(self, text: str) -> Parts:
        """Take more text; returns what it brought."""
        if self._reasoning is None:
            return self._calls.push(text)
        reasoning, content = self._reasoning.push(text)
        return _with_reasoning(reasoning, self._calls.push(content))

    def flush(self) -> Parts:
        """The text has ended; returns what was held back."""
        if self._reasoning is None:
            return self._calls.flush()
        reasoning, content = self._reasoning.flush()
        parts = self._calls.push(content)
        parts.add(self._calls.flush())
        return _with_reasoning(reasoning, parts)


class ReasoningSplitter:
    """Text within <think> and </think> at an answer's beginning, apart from what follows. The tags are nobody's."""

    def __init__(self, *, is_open: bool):
        """is_open: the answer begins within the reasoning, the opening tag being the prompt's or left out."""
        self._is_open = is_open
        self._state = "start"  # start, inside, outside
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that are certain now."""
        text, self._held = self._held + text, ""
        if self._state == "start":
            bare = text.lstrip()
            if THINK.startswith(bare) and bare != THINK:
                self._held = text
                return "", ""
            if bare.startswith(THINK):
                self._state, text = "inside", bare.removeprefix(THINK)
            else:
                self._state = "inside" if self._is_open else "outside"
        if self._state == "outside":
            return "", text
        inside, tag, after = text.partition(END_THINK)
        if tag:
            self._state = "outside"
            return inside, after
        held = _begun(text, END_THINK)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], ""

    def flush(self) -> tuple[str, str]:
        """What was held back, once no more will come."""
        text, self._held = self._held, ""
        is_reasoning = self._state == "inside" or (self._state == "start" and self._is_open)
        return (text, "") if is_reasoning else ("", text)


class _NoCalls:
    def push(self, text: str) -> Parts:
        return Parts(content=text)

    def flush(self) -> Parts:
        return Parts()


class NamedCall:
    """The whole text is the arguments of one call, since a grammar makes it so."""

    def __init__(self, name: str):
        self._name: str | None = name

    def push(self, text: str) -> Parts:
        """More of the arguments."""
        name, self._name = self._name, None
        return Parts(calls={0: CallPart(name, text)}) if name or text else Parts()

    def flush(self) -> Parts:
        """Nothing is held back."""
        return Parts()


class _Calls:
    """What the formats share: one scanner at a time, its call's index, and what it gave out."""

    def __init__(self, names: Collection[str]):
        self._names = frozenset(names)
        self._num_calls = 0
        self._scanner: CallScanner | None = None

    def push(self, text: str) -> Parts:
        """Take more text; returns what it brought."""
        parts = Parts()
        for char in text:
            self._take(char, parts)
        return parts

    def flush(self) -> Parts:
        """What was held back, once no more will come."""
        raise NotImplementedError

    def _take(self, char: str, parts: Parts) -> None:
        raise NotImplementedError

    def _scan(self, char: str, parts: Parts) -> CallScanner | None:
        """Hand a character to the scanner; returns it once it is through, done or failed."""
        scanner = self._scanner
        assert scanner is not None
        was_announced = scanner.is_announced
        scanner.push(char)
        if scanner.is_announced:
            part = parts.calls.setdefault(self._num_calls, CallPart())
            part.arguments += scanner.take_arguments()
            if not was_announced:
                part.name = scanner.name
        if not (scanner.is_done or scanner.has_failed):
            return None
        self._num_calls += scanner.is_announced
        self._scanner = None
        return scanner


class CallList(_Calls):
    """The whole text is a JSON list of calls, since a grammar makes it so (tool_choice "required")."""

    def _take(self, char: str, parts: Parts) -> None:
        if self._scanner is None and char == "{":
            self._scanner = CallScanner(self._names)
        if self._scanner is not None:
            self._scan(char, parts)

    def flush(self) -> Parts:
        """Nothing is held back."""
        return Parts()


class HermesCalls(_Calls):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes, Qwen and many others write calls.

    What stands between the tags and is no call of a known tool is content, tags and all. White space next to a call is
    nobody's.
    """

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self._held = ""  # content that may yet be the beginning of a tag, with the white space before it
        self._is_closing = False  # a call has ended, its closing tag not

    def _take(self, char: str, parts: Parts) -> None:
        if self._scanner is not None:
            scanner = self._scan(char, parts)
            if scanner is not None:
                if scanner.is_announced:
                    self._is_closing = True
                else:
                    parts.content += f"{self._held}{scanner.text}"
                self._held = ""
            return
        self._held += char
        bare = self._held.strip()
        if self._is_closing:
            if END_TOOL_CALL.startswith(bare) and bare != END_TOOL_CALL:
                return
            self._is_closing = False
            if bare == END_TOOL_CALL:
                self._held = ""
                return
        if bare.endswith(TOOL_CALL) and not char.isspace():
            before = self._held[: -len(TOOL_CALL)]
            content = before.rstrip()
            parts.content += content
            self._held = self._held[len(content) :]
            self._scanner = CallScanner(self._names)
            return
        held = _begun(self._held, TOOL_CALL)
        shown = self._held[: len(self._held) - held].rstrip()
        parts.content += shown
        self._held = self._held[len(shown) :]

    def flush(self) -> Parts:
        """What was held back, once no more will come."""
        scanner, self._scanner = self._scanner, None
        held, self._held = self._held, ""
        if scanner is not None:
            return Parts() if scanner.is_announced else Parts(content=held + scanner.text)
        return Parts() if self._is_closing or (self._num_calls and not held.strip()) else Parts(content=held)


class Llama3JsonCalls(_Calls):
    """An answer that is `{"name": …, "parameters": {…}}` and nothing else, or several of them with `;` between."""

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self._held = ""  # white space, separators or the tag before what may be a call
        self._is_content = False

    def _take(self, char: str, parts: Parts) -> None:
        if self._scanner is not None:
            scanner = self._scan(char, parts)
            if scanner is not None:
                if not scanner.is_announced:
                    parts.content += self._held + scanner.text
                    self._is_content = True
                self._held = ""
            return
        if self._is_content:
            parts.content += char
            return
        if char == "{":
            self._scanner = CallScanner(self._names)
            self._scan(char, parts)
            return
        self._held += char
        bare = self._held.strip()
        may_go_on = bare in ("", ";") if self._num_calls else PYTHON_TAG.startswith(bare)
        if not may_go_on:
            parts.content += self._held
            self._held, self._is_content = "", True

    def flush(self) -> Parts:
        """What was held back, once no more will come."""
        scanner, self._scanner = self._scanner, None
        held, self._held = self._held, ""
        if scanner is not None:
            return Parts() if scanner.is_announced else Parts(content=held + scanner.text)
        return Parts() if self._num_calls else Parts(content=held)


CALL_FORMATS: dict[str, type[_Calls]] = {"hermes": HermesCalls, "llama3_json": Llama3JsonCalls}


def call_format_of(chat_template: str) -> str:
    """The format in which a template teaches calls, by the words in it; hermes, the commonest, where it says none."""
    return "llama3_json" if TOOL_CALL not in chat_template and '"parameters"' in chat_template else "hermes"


def knows_tools(chat_template: str) -> bool:
    """Whether a template has a place for tools at all."""
    return "tools" in chat_template


def _with_reasoning(reasoning: str, parts: Parts) -> Parts:
    parts.reasoning += reasoning
    return parts


def _begun(text: str, tag: str) -> int:
    """Length of the longest end of `text` with which `tag` begins, short of all of it."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
