"""Host. Reads one tool call, a JSON object with a name and arguments, character by character."""

import json
from collections.abc import Collection

ARGUMENT_KEYS = ("arguments", "parameters")
_CLOSERS = {"{": "}", "[": "]"}


class CallScanner:
    """Follows one object. What it gives out depends on the characters alone, never on how they came in pieces.

    Nothing is given out before `is_announced`: the name is known and one of `names`, and the arguments have begun as
    an object (a call that ends without any has "{}"). Until then the text may prove to be no call (`has_failed`); from
    then on the arguments flow as they are written, and end where the answer ends.
    """

    def __init__(self, names: Collection[str]):
        self._names = names
        self.text = ""  # all that was taken
        self.name: str | None = None
        self.is_announced = self.is_done = self.has_failed = False
        self._arguments = ""  # what of them is not given out yet
        self._has_arguments = False
        self._state = "open"  # before the object, "before key", key, colon, "before value", value, "after value"
        self._key = self._value = ""
        self._open_brackets = ""  # of the value, as the characters that close them
        self._in_string = self._is_escaped = False

    def push(self, char: str) -> None:
        """Take one character, while the scanner is neither done nor has failed."""
        assert not self.is_done
        assert not self.has_failed
        self.text += char
        if self._state == "key":
            self._key += char
            if self._ends_string(char):
                self._state = "colon"
        elif self._state == "value":
            self._take_value(char)
        elif not char.isspace():
            self._take_mark(char)

    def take_arguments(self) -> str:
        """What came of the arguments since the last call; nothing before `is_announced`."""
        if not self.is_announced:
            return ""
        new, self._arguments = self._arguments, ""
        return new

    def _take_mark(self, char: str) -> None:
        """One of the characters between strings and values."""
        if self._state == "before value":
            self._state, self._value, self._open_brackets = "value", "", ""
            self._take_value(char)
        elif self._state == "before key" and char == '"':
            self._state, self._key = "key", char
        elif self._state in ("before key", "after value") and char == "}":
            self._finish()
        elif (self._state, char) == ("open", "{"):
            self._state = "before key"
        elif (self._state, char) == ("colon", ":"):
            self._state = "before value"
        elif (self._state, char) == ("after value", ","):
            self._state = "before key"
        else:
            self.has_failed = True

    def _take_value(self, char: str) -> None:
        if self._in_string:
            self._add(char)
            self._in_string = not self._ends_string(char)
            if not self._in_string and not self._open_brackets:
                self._end_value()
        elif not self._open_brackets and self._value and (char in ",}" or char.isspace()):
            self._end_value()  # a number or a word, which nothing else ends
            if not char.isspace() and not self.has_failed:
                self._take_mark(char)
        elif char in "}]":
            if self._open_brackets[-1:] != char:
                self.has_failed = True
                return
            self._open_brackets = self._open_brackets[:-1]
            self._add(char)
            if not self._open_brackets:
                self._end_value()
        else:
            self._in_string = char == '"'
            self._open_brackets += _CLOSERS.get(char, "")
            self._add(char)

    def _add(self, char: str) -> None:
        """One more character of the value."""
        self._value += char
        if _text(self._key) not in ARGUMENT_KEYS or (self._has_arguments and self._value == char):
            return
        if self._value == char:
            if char != "{":
                self.has_failed = True
                return
            self._has_arguments = True
        self._arguments += char
        self._announce()

    def _end_value(self) -> None:
        self._state = "after value"
        if _text(self._key) == "name" and self.name is None:
            self.name = _text(self._value)
            self.has_failed = self.name not in self._names
            self._announce()

    def _finish(self) -> None:
        self.is_done = True
        if self.name is not None and not self._has_arguments:
            self._arguments, self._has_arguments = "{}", True
        self._announce()
        self.has_failed = not self.is_announced

    def _announce(self) -> None:
        self.is_announced = self.name in self._names and self._has_arguments

    def _ends_string(self, char: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
            return False
        self._is_escaped = char == "\\"
        return char == '"'


def _text(literal: str) -> str | None:
    """The string that a JSON literal writes, or None where it writes none."""
    try:
        value = json.loads(literal)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
