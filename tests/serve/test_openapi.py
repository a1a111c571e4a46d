"""Host. The document says what the routes take, and the pages need nothing from elsewhere."""

import re

import jsonschema
import pytest

from jaxspec.serve.openapi import SAMPLING_SCHEMAS, document
from jaxspec.serve.protocol import SAMPLING_FIELDS, ChatRequest, CompletionRequest
from tests.serve.fake import FakeEngine, serving

PATHS = document(is_guarded=False)["paths"]


@pytest.fixture(scope="module")
def client():
    with serving(FakeEngine()) as client:
        yield client


def test_every_field_is_described():
    assert set(SAMPLING_SCHEMAS) == set(SAMPLING_FIELDS)
    schemas = document(is_guarded=False)["components"]["schemas"]
    for kind in (CompletionRequest, ChatRequest):
        assert set(schemas[kind.__name__]["properties"]) == {*kind.model_fields, *SAMPLING_FIELDS} - {"sampling"}


def test_every_route_is_described_and_every_description_is_a_route(client):
    listed = client.get("/openapi.json").json
    assert listed["paths"].keys() == PATHS.keys()
    for path, methods in PATHS.items():
        for method in methods:
            response = client.request(method.upper(), path, {} if method == "post" else None)
            assert response.status in (200, 400), path
            assert str(response.status) in methods[method]["responses"]


def test_the_schemas_are_such_and_take_what_the_routes_take(client):
    described = document(is_guarded=True)
    for name, path, good, bad in (
        ("CompletionRequest", "/v1/completions", {"prompt": [1, 2], "top_k": 3, "seed": None}, {"prompt": 5}),
        ("ChatRequest", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, {"messages": "hi"}),
        ("TokenizeRequest", "/tokenize", {"prompt": "hi"}, {"prompt": 4}),
        ("DetokenizeRequest", "/detokenize", {"tokens": [1]}, {"tokens": "1"}),
    ):
        schema = described["components"]["schemas"][name] | {"components": described["components"]}
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(good, schema)
        assert client.post(path, good).status == 200
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
        assert client.post(path, bad).status == 400


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_bring_all_they_need(client, path):
    page = client.get(path)
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//|@import|url\(", page.text)


def test_what_speculation_is_and_does():
    with serving(FakeEngine()) as client:
        check_speculation(client)


def check_speculation(client):
    before = client.get("/v1/speculation").json
    assert (before["enabled"], before["config"], before["acceptance"]["draft_acceptance_rate"]) == (False, None, 0.0)
    figures = client.post("/v1/completions", {"prompt": "hi", "max_tokens": 9}).json["metrics"]["speculative_decoding"]
    after = client.get("/v1/speculation").json["acceptance"]
    assert {key: after[key] for key in figures} == figures
    assert after["acceptance_per_position"][:3] == [1.0, 1.0, 0.0]
    assert client.get("/version").json["jax"]
    assert client.get("/v1/models/fake").json["id"] == "fake"
    assert client.get("/v1/models/other").status == 404


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
def test_schemathesis_finds_no_5xx(client):
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (requirements/dev.txt)")
    import hypothesis

    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{client.port}/openapi.json")
    counts = {}
    for result in schema.get_all_operations():
        operation = result.ok()

        @hypothesis.settings(
            max_examples=100, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        @hypothesis.given(case=operation.as_strategy())
        def ask(case):
            response = case.call()
            counts[response.status_code] = counts.get(response.status_code, 0) + 1
            assert response.status_code < 500, (case.body, response.text)

        ask()
    assert counts[200] > 20
    assert counts[400] > 50
