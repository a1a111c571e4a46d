"""Host. `StructuredOutputsParams`: the form that a request wants its text to have, in vLLM's words."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from jaxspec.errors import RequestError

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
REFUSED = ("disable_additional_properties", "structural_tag")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of json, regex, choice, grammar and json_object says what the whole answer must be.

    >>> StructuredOutputsParams(choice=["yes", "no"]).choice
    ('yes', 'no')

    Raises: RequestError naming what is wrong.
    """

    json: str | Mapping[str, Any] | bool | None = None  # a JSON schema; kept as text
    regex: str | None = None  # of the whole answer; Rust's syntax, without look-around
    choice: Sequence[str] | None = None  # one of these texts
    grammar: str | None = None  # Lark's syntax, or GBNF
    json_object: bool | None = None  # any JSON object

    disable_any_whitespace: bool = False  # no white space between the tokens of JSON
    whitespace_pattern: str | None = None  # or what this regular expression matches
    disable_fallback: bool = False  # there is one backend, and so no fallback

    # jaxspec's own: the constraint begins after this token of the answer, such as "</think>". The prompt is not looked
    # at: leave it out where the prompt ends the reasoning.
    reasoning_end_str: str | None = None

    disable_additional_properties: bool = False
    structural_tag: str | None = None

    # The request's field that this came from, for messages.
    param: str = field(default="structured_outputs", repr=False)

    def __post_init__(self):
        for name in REFUSED:
            if getattr(self, name) not in (None, False):
                self._refuse(f"{name} is not supported; write what it does into the schema or the grammar")
        if self.json_object not in (None, True):
            self._refuse(f"json_object must be true or left out, got {self.json_object!r:.80}")
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            self._refuse(f"exactly one of {', '.join(CONSTRAINTS)} must be given, got {got}; give one")
        for name in ("regex", "grammar", "whitespace_pattern", "reasoning_end_str"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                self._refuse(f"{name} must be a non-empty text, got {value!r:.80}")
        for name in ("disable_any_whitespace", "disable_fallback"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(f"{name} must be true or false, got {getattr(self, name)!r:.80}")
        if self.choice is not None:
            self._tidy_choice()
        if self.json is not None:
            object.__setattr__(self, "json", self._json_text())
        if (self.disable_any_whitespace or self.whitespace_pattern) and self.json is None and not self.json_object:
            self._refuse("disable_any_whitespace and whitespace_pattern go with json or json_object; leave them out")
        if self.disable_any_whitespace and self.whitespace_pattern:
            self._refuse("disable_any_whitespace and whitespace_pattern contradict each other; leave one out")

    @property
    def kind(self) -> str:
        """What the constraint is, in words."""
        names = {"regex": "regular expression", "choice": "choice", "grammar": "grammar"}
        return next((name for key, name in names.items() if getattr(self, key) is not None), "JSON schema")

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], param: str = "structured_outputs") -> "StructuredOutputsParams":
        """The same from the fields of a request.

        Raises: RequestError for unknown ones too.
        """
        known = [one.name for one in fields(cls) if one.name != "param"]
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=3, cutoff=0.6)
                remedy = f"did you mean {' or '.join(near)}?" if near else "leave it out"
                raise RequestError(f"{param}: unknown field {key!r:.80}; {remedy}", param=param)
        return cls(**given, param=param)

    def _tidy_choice(self) -> None:
        choice = self.choice
        if (
            not isinstance(choice, Sequence)
            or isinstance(choice, str | bytes)
            or not choice
            or not all(isinstance(text, str) and text for text in choice)
        ):
            self._refuse(f"choice must be a non-empty list of non-empty texts, got {choice!r:.80}")
        object.__setattr__(self, "choice", tuple(choice))

    def _json_text(self) -> str:
        """The schema as text, its keys in the order they came in: that is the order of the answer's."""
        schema = self.json
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(schema, Mapping | bool):
                self._refuse(f"json must be a JSON schema, an object or true, got {schema!r:.80}")
            return json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            self._refuse(f"json is no JSON schema: {error!s:.200}")

    def _refuse(self, message: str) -> NoReturn:
        raise RequestError(f"{self.param}: {message}", param=self.param)
