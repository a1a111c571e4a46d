"""Host. The OpenAPI document of the routes, and the same as one page without scripts or outside parts."""

import html
import json
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel

from jaxspec.serve.protocol import (
    MAX_TEXT_CHARACTERS,
    MAX_TEXTS,
    SAMPLING_FIELDS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_INTEGERS = {"type": "array", "items": {"type": "integer"}}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_WORD = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT_CHARACTERS}
_WORDS = {"type": "array", "items": _WORD, "maxItems": MAX_TEXTS}
_OBJECT = {"type": "object"}

# The sampling fields' schemas; what they mean stands in `jaxspec.sampling.params.SamplingParams`.
SAMPLING_SCHEMAS: dict[str, dict[str, Any]] = {
    "n": {"type": "integer", "minimum": 1, "default": 1},
    "temperature": {"type": "number", "minimum": 0, "default": 1},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "default": 1},
    "top_k": {"type": "integer", "minimum": -1, "default": 0},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1, "default": 0},
    "seed": {"type": "integer"},
    "stop": {"anyOf": [_WORD, _WORDS]},
    "stop_token_ids": _INTEGERS,
    "max_tokens": {"type": "integer", "minimum": 0},
    "min_tokens": {"type": "integer", "minimum": 0, "default": 0},
    "ignore_eos": {"type": "boolean", "default": False},
    "include_stop_str_in_output": {"type": "boolean", "default": False},
    "skip_special_tokens": {"type": "boolean", "default": True},
    "spaces_between_special_tokens": {"const": True},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2, "default": 0},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2, "default": 0},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "default": 1},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "bad_words": _WORDS,
    "allowed_token_ids": _INTEGERS | {"minItems": 1},
    "logprobs": {"anyOf": [{"type": "integer", "minimum": -1}, {"type": "boolean"}]},
    "prompt_logprobs": {"type": "integer", "minimum": -1},
    "truncate_prompt_tokens": {"type": "null"},
    "speculative": {
        "type": "object",
        "properties": {
            "enabled": {"type": "boolean", "default": True},
            "num_speculative_tokens": {"type": "integer", "minimum": 0},
        },
        "additionalProperties": False,
    },
    "extra_args": _OBJECT,
    "vllm_xargs": _OBJECT,
    "response_format": {
        "type": "object",
        "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": _OBJECT},
        "required": ["type"],
    },
    "structured_outputs": _OBJECT,
    "guided_json": {"anyOf": [_OBJECT, {"type": "string"}]},
    "guided_regex": {"type": "string", "minLength": 1},
    "guided_choice": _TEXTS | {"minItems": 1},
    "guided_grammar": {"type": "string", "minLength": 1},
    "guided_whitespace_pattern": {"type": "string", "minLength": 1},
}

_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _TEXTS | {"minItems": 1},
        _INTEGERS | {"minItems": 1},
        {"type": "array", "items": _INTEGERS | {"minItems": 1}, "minItems": 1},
    ]
}
_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ]
}

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_REFUSALS = {
    "400": "a field is wrong; the error's param names it",
    "401": "no API key, or a wrong one",
    "404": "no such model",
    "408": "the body took too long",
    "413": "the body is too large",
    "429": "the queue is full; Retry-After says when to come again",
    "503": "the engine is starting, or has failed",
    "504": "no answer within the server's request_timeout_s",
}


def document(*, is_guarded: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document. is_guarded: whether API keys are asked for."""
    bodies = {
        "CompletionRequest": _schema(CompletionRequest, {"prompt": _PROMPT}),
        "ChatRequest": _schema(ChatRequest, {"tool_choice": _TOOL_CHOICE}),
        "TokenizeRequest": _schema(TokenizeRequest),
        "DetokenizeRequest": _schema(DetokenizeRequest),
    }
    schemas: dict[str, Any] = {"Error": _ERROR}
    for name, schema in bodies.items():
        schemas |= schema.pop("$defs", {})
        schemas[name] = schema
    post, get = _post, _get
    paths = {
        "/v1/completions": post("CompletionRequest", "Continue a text", streams=True),
        "/v1/chat/completions": post("ChatRequest", "Answer a conversation", streams=True),
        "/tokenize": post("TokenizeRequest", "Token ids of a text or a conversation"),
        "/detokenize": post("DetokenizeRequest", "The text of token ids"),
        "/v1/models": get("The model that is served"),
        "/v1/speculation": get("How tokens are guessed here, and how many guesses were kept"),
        "/health": get(
            "200 once everything is compiled; 503 before, when the engine is stuck, and after it failed",
            refusal=_OBJECT,
        ),
        "/metrics": get("Prometheus metrics under vLLM's names", kind="text/plain"),
        "/version": get("Versions of jaxspec and JAX"),
    }
    info = {"title": "jaxspec", "version": version("jaxspec"), "description": "OpenAI's routes, with vLLM's extras."}
    components: dict[str, Any] = {"schemas": schemas}
    found: dict[str, Any] = {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}
    if is_guarded:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def document_page(described: dict[str, Any]) -> bytes:
    """The document as HTML that needs nothing but itself."""
    parts = []
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation['summary'])}</p>")
            body = operation.get("requestBody")
            if body is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
                parts.append(_fields_table(described["components"]["schemas"][name]))
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>jaxspec: routes</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem;color-scheme:light dark}}
table{{border-collapse:collapse;width:100%;display:block;overflow-x:auto}}
td,th{{border-bottom:1px solid #8886;padding:.25rem .5rem;text-align:left;vertical-align:top}}
td code{{white-space:pre-wrap;overflow-wrap:anywhere}}</style>
<h1>jaxspec {html.escape(described["info"]["version"])}</h1>
<p>{html.escape(described["info"]["description"])} As a document for programs: <a href="openapi.json">openapi.json</a>.
</p>{"".join(parts)}</html>"""
    return page.encode()


def _schema(kind: type[BaseModel], instead: dict[str, Any] | None = None) -> dict[str, Any]:
    """A body's schema: the model's own fields, and the sampling fields in place of the one that gathers them."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    properties = schema["properties"]
    if properties.pop("sampling", None) is not None:
        nullable = {name: {"anyOf": [SAMPLING_SCHEMAS[name], {"type": "null"}]} for name in SAMPLING_FIELDS}
        properties |= nullable
    properties |= instead or {}
    return schema


def _post(body: str, summary: str, *, streams: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _OBJECT}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    schema = {"$ref": f"#/components/schemas/{body}"}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": {"200": {"description": "the answer", "content": content}} | _refusals(),
        }
    }


def _get(summary: str, *, kind: str = "application/json", refusal: dict[str, Any] | None = None) -> dict[str, Any]:
    schema = _OBJECT if kind == "application/json" else {"type": "string"}
    responses = {"200": {"description": "as it is now", "content": {kind: {"schema": schema}}}}
    responses |= _refusals("401", "503", schema=refusal)
    return {"get": {"summary": summary, "responses": responses}}


def _refusals(*codes: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    content = {"application/json": {"schema": schema or {"$ref": "#/components/schemas/Error"}}}
    return {code: {"description": _REFUSALS[code], "content": content} for code in codes or _REFUSALS}


def _fields_table(schema: dict[str, Any]) -> str:
    rows = []
    for name, field in schema["properties"].items():
        needed = " (needed)" if name in schema.get("required", ()) else ""
        shown = {key: value for key, value in field.items() if key != "title"}
        text = html.escape(json.dumps(shown))
        rows.append(f"<tr><td><code>{html.escape(name)}</code>{needed}<td><code>{text}</code>")
    return f"<table><tr><th>field<th>schema{''.join(rows)}</table>"
