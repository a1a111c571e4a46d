"""Host. Chats with tools and reasoning over the routes: whole, streamed in blocks of 1 to 9, and what is refused."""

import json

import pytest

from jaxspec import StructuredOutputsParams
from jaxspec.config.server import ServerConfig
from jaxspec.text.tokenizer import Tokenizer
from tests.serve.fake import CHAT_TEMPLATE, LETTERS, FakeEngine, serving

CHAT = "/v1/chat/completions"
ALL_LETTERS = LETTERS + '<>/_{}[]"\\,.;é' + "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TEMPLATE = "{% if tools %}<tool_call> {{ tools | tojson }}\n{% endif %}" + CHAT_TEMPLATE
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
ASKED = {"messages": [{"role": "user", "content": "how is it?"}]}
ARGUMENTS = '{"city": "Zürich }\\" {"}'.replace("ü", "é")
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


def served(answer, block=3, template=TEMPLATE, **config):
    engine = FakeEngine(block, 600, answer=answer, letters=ALL_LETTERS, chat_template=template)
    return engine, serving(engine, ServerConfig(**config))


def joined(chunks):
    """A streamed choice as a message, its calls without ids, and its reason."""
    message, calls, reasons, ids = {"content": "", "reasoning_content": ""}, {}, [], []
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in message:
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    ids.append(call["id"])
                    assert call["index"] not in calls, "a call opens once"
                    assert call["type"] == "function"
                    calls[call["index"]] = {"name": call["function"]["name"], "arguments": ""}
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(set(ids)) == len(calls)
    return message, [calls[index] for index in sorted(calls)], reasons


ANSWERS = {
    "a call": (CALL, "", "", [{"name": "weather", "arguments": ARGUMENTS}]),
    "text and two calls": (
        f'let me.\n\n{CALL}\n<tool_call>{{"name": "time", "arguments": {{}}}}</tool_call>',
        "let me.",
        "",
        [{"name": "weather", "arguments": ARGUMENTS}, {"name": "time", "arguments": "{}"}],
    ),
    "reasoning, then a call": (
        f"<think>hm, <tool_call>?</think>{CALL}",
        "",
        "hm, <tool_call>?",
        [{"name": "weather", "arguments": ARGUMENTS}],
    ),
    "neither": ("no <tool of any kind", "no <tool of any kind", "", []),
    "reasoning alone": ("<think>hm</think>so it is", "so it is", "hm", []),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_parts_are_the_same_whole_or_in_blocks(name):
    answer, content, reasoning, calls = ANSWERS[name]
    reason = "tool_calls" if calls else "stop"
    engine, serves = served(answer, reasoning_parser="qwen3")
    with serves as client:
        for engine.block in range(1, 10):
            (choice,) = client.post(CHAT, ASKED | {"tools": TOOLS}).json["choices"]
            streamed = joined(client.stream(CHAT, ASKED | {"tools": TOOLS}))
            by_token = {"stream_options": {"one_token_per_chunk": True}}
            token_by_token = joined(client.stream(CHAT, ASKED | {"tools": TOOLS} | by_token))
            message = choice["message"]
            assert choice["finish_reason"] == reason
            assert message["content"] == (content or (None if calls else ""))
            assert message.get("reasoning_content", "") == reasoning
            assert [call["function"] for call in message.get("tool_calls", [])] == calls
            assert all(call["id"].startswith("call_") for call in message.get("tool_calls", []))
            assert streamed == ({"content": content, "reasoning_content": reasoning}, calls, [reason])
            assert token_by_token == streamed


def test_tools_reach_the_template_and_no_tool_is_content():
    engine, serves = served(CALL)
    with serves as client:
        assert client.post(CHAT, ASKED | {"tools": TOOLS, "tool_choice": "none"}).json["choices"][0]["message"] == {
            "role": "assistant",
            "content": CALL,
        }
        client.post(CHAT, ASKED | {"tools": TOOLS})
        tokens = client.post("/tokenize", ASKED | {"tools": TOOLS}).json["tokens"]
    without, within = ("".join(ALL_LETTERS[i] for i in prompt) for prompt in engine.prompts)
    assert without == "user:how is it?\nassistant:"
    assert '"weather"' in within
    assert tokens == engine.prompts[1]


@pytest.mark.parametrize("block", range(1, 10))
def test_a_forced_call_is_made_by_a_grammar(block):
    engine, serves = served(
        '[{"name": "weather", "parameters": {"city": "A"}}, {"name": "time", "parameters": {}}]', block
    )
    with serves as client:
        body = ASKED | {"tools": TOOLS, "tool_choice": "required"}
        (choice,) = client.post(CHAT, body).json["choices"]
        streamed = joined(client.stream(CHAT, body))
        client.post(CHAT, body | {"parallel_tool_calls": False})
    calls = [{"name": "weather", "arguments": '{"city": "A"}'}, {"name": "time", "arguments": "{}"}]
    assert [call["function"] for call in choice["message"]["tool_calls"]] == calls
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert streamed[1:] == (calls, ["tool_calls"])
    schema = json.loads(engine.params[0].structured_outputs.json)
    weather, time = schema["items"]["anyOf"]
    assert (schema["type"], schema["minItems"], weather["properties"]["parameters"]) == ("array", 1, SCHEMA)
    assert time["properties"]["name"] == {"const": "time"}
    assert json.loads(engine.params[-1].structured_outputs.json)["maxItems"] == 1


@pytest.mark.parametrize("block", range(1, 10))
def test_a_named_call_is_its_arguments(block):
    engine, serves = served('{"city": "A"}', block)
    with serves as client:
        body = ASKED | {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
        (choice,) = client.post(CHAT, body).json["choices"]
        cut = client.post(CHAT, body | {"max_tokens": 5}).json["choices"][0]
        streamed = joined(client.stream(CHAT, body))
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "A"}'}
    assert streamed[1:] == ([call["function"]], ["tool_calls"])
    assert cut["finish_reason"] == "length"
    assert cut["message"]["tool_calls"][0]["function"]["arguments"] == '{"cit'
    assert engine.params[0].structured_outputs == StructuredOutputsParams(json=SCHEMA, param="tool_choice")


def test_llama_3_s_calls_by_its_template():
    template = 'use {"name": function name, "parameters": {}} {{ "{{ tools" }}' + CHAT_TEMPLATE
    _, serves = served('{"name": "time", "parameters": {}}', template=template.replace("use {", "use { "))
    with serves as client:
        (choice,) = client.post(CHAT, ASKED | {"tools": TOOLS}).json["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}


def test_a_conversation_with_calls_reads_back():
    """What an answer gave, sent back as OpenAI's clients do, nulls included."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}/"
        "{% endfor %}{{ tools is defined }}"
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    given = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": None}
    messages = [*ASKED["messages"], given, {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}]
    engine, serves = served("ok", template=template)
    with serves as client:
        assert client.post(CHAT, {"messages": messages, "tools": TOOLS}).status == 200
    said = "".join(ALL_LETTERS[i] for i in engine.prompts[0])
    assert said == "user:how is it?/assistant:weatherRome/tool:sunny/True"


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "code"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}],
          "tool_choice": "required"}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 3}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "weather"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": TOOLS, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"messages": [{"role": "tool"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "a", "refusal": "no"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "a", "arguments": "[1]"}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "a", "arguments": "[" * 9999}}]}]}, "messages"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_a_400_by_its_name(refusing_client, fields, param):
    response = refusing_client.post(CHAT, ASKED | fields)
    assert (response.status, response.json["error"]["param"]) == (400, param), response.text


@pytest.fixture(scope="module")
def refusing_client():
    _, serves = served("ok")
    with serves as client:
        yield client


def test_a_template_without_a_place_for_tools_is_told(tmp_path):
    _, serves = served(CALL, template=CHAT_TEMPLATE)
    with serves as client:
        response = client.post(CHAT, ASKED | {"tools": TOOLS})
    assert (response.status, response.json["error"]["param"]) == (400, "tools")
    assert "--chat-template" in response.json["error"]["message"]
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    engine, serves = served(CALL, template=CHAT_TEMPLATE, chat_template=str(tmp_path / "template.jinja"))
    with serves as client:
        assert client.post(CHAT, ASKED | {"tools": TOOLS}).json["choices"][0]["message"]["tool_calls"]
    assert len(engine.prompts) == 1


def test_a_form_is_asked_for_after_the_reasoning():
    engine, serves = served("so</think>{}", reasoning_parser="deepseek_r1")
    with serves as client:
        (choice,) = client.post(CHAT, ASKED | {"response_format": {"type": "json_object"}}).json["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("so", "{}")
    assert engine.params[0].structured_outputs.reasoning_end_str == "</think>"


def test_tags_that_are_special_tokens_are_not_left_out_of_the_text():
    engine, serves = served(CALL, reasoning_parser="qwen3")
    backend = engine.tokenizer.backend
    with serves as client:
        client.post(CHAT, ASKED | {"tools": TOOLS})
        backend.add_special_tokens(["</think>", "</tool_call>"])
        engine.tokenizer = Tokenizer(backend, chat_template=TEMPLATE)
        client.post(CHAT, ASKED | {"tools": TOOLS})
        client.post("/v1/completions", {"prompt": "hi"})
    assert [params.skip_special_tokens for params in engine.params] == [True, False, True]
