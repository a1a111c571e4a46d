"""Host. response_format, structured_outputs and guided_*: each becomes the request's one form, or a 400 by its name."""

import pytest

from jaxspec import StructuredOutputsParams
from tests.serve.fake import FakeEngine, serving

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def served():
    engine = FakeEngine()
    with serving(engine) as client:
        yield engine, client


def ask(client, **fields):
    """Both routes; their answers' statuses and errors must agree."""
    first = client.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 2} | fields)
    second = client.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2} | fields)
    assert first.status == second.status
    assert first.json.get("error") == second.json.get("error")
    return first


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_json": None}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"regex": None}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True, "param": "response_format"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"json": SCHEMA, "param": "response_format"},
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "description": "y", "schema": SCHEMA, "strict": True},
                }
            },
            {"json": SCHEMA, "param": "response_format"},
        ),
        ({"guided_json": SCHEMA}, {"json": SCHEMA, "param": "guided_json"}),
        ({"guided_json": '{"type": "integer"}'}, {"json": {"type": "integer"}, "param": "guided_json"}),
        ({"guided_regex": "a+"}, {"regex": "a+", "param": "guided_regex"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"], "param": "guided_choice"}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"', "param": "guided_grammar"}),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " "},
            {"json": SCHEMA, "whitespace_pattern": " ", "param": "guided_whitespace_pattern"},
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            {"json": SCHEMA, "disable_any_whitespace": True},
        ),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, {"regex": "a"}),
    ],
)
def test_each_way_of_asking_becomes_the_same_parameters(served, fields, expected):
    engine, client = served
    assert ask(client, **fields).status == 200
    wanted = None if expected is None else StructuredOutputsParams(**expected)
    assert [params.structured_outputs for params in engine.params[-2:]] == [wanted] * 2


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {}}, "response_format", "one of text, json_object, json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "one of text"),
        ({"response_format": {"type": ["text"]}}, "response_format", "one of text"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "unknown field 'schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "needs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format",
            "json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": 1}}},
            "response_format",
            "json_schema.strict",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "y": 1}}},
            "response_format",
            "unknown field 'y'",
        ),
        ({"structured_outputs": "a"}, "structured_outputs", "must be an object"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs", "did you mean regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
        ({"guided_choice": []}, "guided_choice", "non-empty list"),
        ({"guided_json": 4}, "guided_json", "JSON schema"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "goes with guided_json"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "goes with guided_json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "each ask for a form"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format", "each ask for a form"),
        ({"guided_decoding_backend": "guidance", "guided_regex": "a"}, "guided_decoding_backend", "unknown field"),
    ],
)
def test_what_is_wrong_is_a_400_by_its_name(served, fields, param, says):
    answer = ask(served[1], **fields)
    assert answer.status == 400
    assert answer.json["error"]["param"] == param
    assert says in answer.json["error"]["message"]
