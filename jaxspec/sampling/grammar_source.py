"""Host. A request's constraint in the form that llguidance compiles."""

import llguidance

from jaxspec.errors import RequestError
from jaxspec.sampling.structured_outputs import StructuredOutputsParams

MAX_SOURCE_CHARS = 2**18  # of a schema, a regular expression, a grammar, or all choices together


def grammar_source(spec: StructuredOutputsParams) -> str:
    """llguidance's own form of the constraint; whether it makes sense shows when it is compiled.

    Raises:
        RequestError: it is too long, or cannot even be read.
    """
    text = spec.regex or spec.grammar or spec.json or "".join(spec.choice or ())
    if isinstance(text, str) and len(text) > MAX_SOURCE_CHARS:
        raise refusal(spec, f"has {len(text)} characters and must not exceed {MAX_SOURCE_CHARS}; make it shorter")
    try:
        if spec.regex is not None:
            return llguidance.LLMatcher.grammar_from_regex(spec.regex)
        if spec.grammar is not None:
            return llguidance.grammar_from("grammar", spec.grammar)
        if spec.choice is not None:
            # One lexeme: as alternatives of a rule many texts would be too many items of the parser.
            return llguidance.LLMatcher.grammar_from_regex("|".join(map(_escaped, spec.choice)))
        options: dict = {"whitespace_flexible": False} if spec.disable_any_whitespace else {}
        if spec.whitespace_pattern is not None:
            options["whitespace_pattern"] = spec.whitespace_pattern
        schema = spec.json if isinstance(spec.json, str) else '{"type": "object"}'
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options or None)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise refusal(spec, f"cannot be compiled: {error}") from None


def _escaped(text: str) -> str:
    """A regular expression that matches the text alone."""
    return "".join(f"\\{letter}" if letter in "\\.+*?()|[]{}^$&~#-/" else letter for letter in text)


def refusal(spec: StructuredOutputsParams, what: str) -> RequestError:
    """The error of a constraint that cannot be used."""
    return RequestError(f"{spec.param}: the {spec.kind} {what.strip():.600}", param=spec.param)
