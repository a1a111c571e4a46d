"""Host. `StructuredOutputsParams`: exactly one constraint, every other wish honoured or refused by name."""

import pytest

from jaxspec import RequestError, SamplingParams, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object must be given, got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
        ({"json": SCHEMA, "json_object": True}, "got json and json_object"),
        ({"regex": ""}, "regex must be a non-empty text"),
        ({"regex": 3}, "regex must be a non-empty text, got 3"),
        ({"grammar": ["a"]}, "grammar must be"),
        ({"choice": []}, "choice must be a non-empty list"),
        ({"choice": "ab"}, "choice must be"),
        ({"choice": ["a", 1]}, "choice must be"),
        ({"choice": ["a", ""]}, "choice must be"),
        ({"json": "{"}, "json is no JSON schema"),
        ({"json": "[1]"}, "must be a JSON schema, an object or true"),
        ({"json": 3}, "must be a JSON schema"),
        ({"json": {"const": float("nan")}}, "json is no JSON schema"),
        ({"json": {"const": {1}}}, "json is no JSON schema"),
        ({"json_object": False}, "json_object must be true or left out"),
        ({"json_object": "yes"}, "json_object must be true"),
        ({"regex": "a", "disable_any_whitespace": True}, "go with json or json_object"),
        ({"json": SCHEMA, "disable_any_whitespace": 1}, "disable_any_whitespace must be true or false"),
        ({"json": SCHEMA, "disable_fallback": None}, "disable_fallback must be true or false"),
        ({"json": SCHEMA, "disable_any_whitespace": True, "whitespace_pattern": " ?"}, "contradict"),
        ({"json": SCHEMA, "disable_additional_properties": True}, "disable_additional_properties is not supported"),
        ({"structural_tag": "{}"}, "structural_tag is not supported"),
        ({"regex": "a", "reasoning_end_str": ""}, "reasoning_end_str must be"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given, says):
    for ask in (
        lambda: StructuredOutputsParams(**given),
        lambda: SamplingParams(structured_outputs=given),
        lambda: SamplingParams(structured_outputs=StructuredOutputsParams(**given)),
    ):
        with pytest.raises(RequestError, match=says) as caught:
            ask()
        assert caught.value.param == "structured_outputs"


def test_unknown_fields_are_named_with_their_neighbours():
    with pytest.raises(RequestError, match="unknown field 'regexp'; did you mean regex"):
        SamplingParams(structured_outputs={"regexp": "a"})
    with pytest.raises(RequestError, match="unknown field 'param'"):
        SamplingParams(structured_outputs={"regex": "a", "param": "n"})
    for wrong in ("a", 3, [1], True):
        with pytest.raises(RequestError, match="structured_outputs must be"):
            SamplingParams(structured_outputs=wrong)  # pyright: ignore[reportArgumentType]


def test_a_map_and_the_class_are_the_same():
    for given in ({"json": SCHEMA}, {"choice": ["a", "b"]}, {"json_object": True, "disable_fallback": True}):
        params = SamplingParams(structured_outputs=given)  # pyright: ignore[reportArgumentType]
        assert params.structured_outputs == StructuredOutputsParams(**given)
    assert SamplingParams().structured_outputs is None


def test_a_schema_is_kept_as_text_in_its_own_order():
    """Its order is the order of the answer's keys."""
    one, same, other = (
        StructuredOutputsParams(json=schema)
        for schema in (SCHEMA, '{"type":"object", "properties":{"b":{},"a":{}}}', {"properties": {"a": {}, "b": {}}})
    )
    assert one == same != other
    assert isinstance(one.json, str)
    assert one.json.index('"b"') < one.json.index('"a"')
