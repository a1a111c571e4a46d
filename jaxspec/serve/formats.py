"""Host. The ways to ask for structured output over HTTP, OpenAI's and vLLM's, as the one that a request has."""

from collections.abc import Mapping
from typing import Any

from jaxspec.errors import RequestError
from jaxspec.sampling.structured_outputs import CONSTRAINTS, StructuredOutputsParams

FORMAT_FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_whitespace_pattern",
)  # fmt: skip

_RESPONSE_FORMATS = ("text", "json_object", "json_schema")


def settle_formats(sampling: dict[str, Any]) -> StructuredOutputsParams | None:
    """Take the fields out of a request's, and give what they ask for together.

    Raises: RequestError naming the field that is wrong, or that contradicts another.
    """
    given = {name: sampling.pop(name) for name in FORMAT_FIELDS if sampling.get(name) is not None}
    whitespace = given.pop("guided_whitespace_pattern", None)
    found = {name: params for name, value in given.items() if (params := _params(name, value)) is not None}
    if len(found) > 1:
        raise RequestError(f"{' and '.join(found)} each ask for a form of the text; send one of them", param=max(found))
    if whitespace is None:
        return next(iter(found.values()), None)
    if "guided_json" not in found:
        raise RequestError(
            "guided_whitespace_pattern goes with guided_json; send both or neither", param="guided_whitespace_pattern"
        )
    return StructuredOutputsParams(
        json=given["guided_json"], whitespace_pattern=whitespace, param="guided_whitespace_pattern"
    )


def _params(name: str, value: Any) -> StructuredOutputsParams | None:
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        if not isinstance(value, Mapping):
            raise RequestError(f"structured_outputs must be an object, got {value!r:.80}", param=name)
        asks = {key: item for key, item in value.items() if item is not None}
        return StructuredOutputsParams.from_mapping(asks) if asks else None
    constraint = name.removeprefix("guided_")
    assert constraint in CONSTRAINTS
    return StructuredOutputsParams(**{constraint: value}, param=name)


def _response_format(value: Any) -> StructuredOutputsParams | None:
    """OpenAI's. strict is true whether asked for or not; name and description are for the caller's own books."""
    param = "response_format"
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in _RESPONSE_FORMATS:
        raise RequestError(
            f'response_format must be an object whose "type" is one of {", ".join(_RESPONSE_FORMATS)}, got '
            f"{value!r:.80}",
            param=param,
        )
    _check_keys(param, value, {"type", "json_schema"} if kind == "json_schema" else {"type"})
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, param=param)
    wanted = value.get("json_schema")
    if not isinstance(wanted, Mapping) or not isinstance(wanted.get("schema"), Mapping):
        raise RequestError(
            f'response_format of type json_schema needs "json_schema": {{"name": ..., "schema": {{...}}}}, got '
            f"{value!r:.200}",
            param=param,
        )
    _check_keys(f"{param}.json_schema", wanted, {"name", "description", "schema", "strict"})
    for key, kinds in {"name": str, "description": str | None, "strict": bool | None}.items():
        if not isinstance(wanted.get(key), kinds):
            raise RequestError(f"response_format.json_schema.{key} is wrong: {wanted.get(key)!r:.80}", param=param)
    return StructuredOutputsParams(json=wanted["schema"], param=param)


def _check_keys(where: str, value: Mapping[str, Any], known: set[str]) -> None:
    for key in value:
        if key not in known:
            raise RequestError(f"{where}: unknown field {key!r:.80}; leave it out", param="response_format")
