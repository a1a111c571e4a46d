"""Host. Content, reasoning and tool calls: what a text holds is the same however it came in pieces."""

import json
import random

import pytest

from jaxspec.text.answer_parts import (
    AnswerParser,
    CallList,
    HermesCalls,
    Llama3JsonCalls,
    NamedCall,
    Parts,
    ReasoningSplitter,
    call_format_of,
    knows_tools,
)

NAMES = ["get", "größe"]
TRICKY = '{"a": "}\\"]{ <tool_call> é", "b": [1, {"c": null}], "d": -1.5e3}'


def read(make, text, block):
    """Everything that a fresh parser gives of the text, fed in blocks."""
    parser, parts = make(), Parts()
    for start in range(0, len(text), block):
        parts.add(parser.push(text[start : start + block]))
    parts.add(parser.flush())
    calls = [(parts.calls[i].name, parts.calls[i].arguments) for i in sorted(parts.calls)]
    return parts.content, parts.reasoning, calls


def hermes():
    return HermesCalls(NAMES)


def llama():
    return Llama3JsonCalls(NAMES)


def call(name="get", arguments=TRICKY, key="arguments"):
    return f'{{"name": "{name}", "{key}": {arguments}}}'


CASES = [
    (hermes, "plain text, < and <tool", "plain text, < and <tool", []),
    (hermes, f"<tool_call>\n{call()}\n</tool_call>", "", [("get", TRICKY)]),
    (hermes, f"Let me.\n\n<tool_call>{call()}</tool_call>", "Let me.", [("get", TRICKY)]),
    (
        hermes,
        f"<tool_call>{call()}</tool_call>\n<tool_call>\n{call('größe', '{}')}\n</tool_call>\n",
        "",
        [("get", TRICKY), ("größe", "{}")],
    ),
    # arguments first: nothing can be told before the name
    (hermes, f'<tool_call>{{"arguments": {TRICKY}, "name": "get"}}</tool_call>', "", [("get", TRICKY)]),
    (hermes, '<tool_call>{"name": "get"}</tool_call>', "", [("get", "{}")]),
    (hermes, '<tool_call>{"id": 7, "x": [1], "name": "g\\u0065t", "parameters": {}}</tool_call>', "", [("get", "{}")]),
    # what is no call is content, tags and all
    (hermes, "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
    (hermes, f"a <tool_call>{call('other')}</tool_call>", f"a <tool_call>{call('other')}</tool_call>", []),
    (hermes, '<tool_call>{"name": "get", "arguments": "x"}', '<tool_call>{"name": "get", "arguments": "x"}', []),
    (hermes, '<tool_call>{"name": "get", "argu', '<tool_call>{"name": "get", "argu', []),
    (hermes, "ends in space \n", "ends in space \n", []),
    # cut short, or wrong once the call is announced: what there was stays
    (hermes, '<tool_call>{"name": "get", "arguments": {"a": [1', "", [("get", '{"a": [1')]),
    (hermes, '<tool_call>{"name": "get", "arguments": {"a": 1]}', "}", [("get", '{"a": 1')]),
    (hermes, f"<tool_call>{call()}</tool_call>done", "done", [("get", TRICKY)]),
    (llama, call(key="parameters"), "", [("get", TRICKY)]),
    (llama, f"\n<|python_tag|>{call()}; {call('größe', '{}')}", "", [("get", TRICKY), ("größe", "{}")]),
    (llama, '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    (llama, '{"answer": 4} is it', '{"answer": 4} is it', []),
    (llama, f"I call {call()}", f"I call {call()}", []),
    (llama, "  ", "  ", []),
    (lambda: CallList(NAMES), f"[{call()}, {call('größe', '{}')}]", "", [("get", TRICKY), ("größe", "{}")]),
    (lambda: NamedCall("get"), TRICKY, "", [("get", TRICKY)]),
    (AnswerParser, "anything <tool_call>", "anything <tool_call>", []),
]  # fmt: skip


@pytest.mark.parametrize(("make", "text", "content", "calls"), CASES)
def test_calls_and_content_whatever_the_block(make, text, content, calls):
    for block in (*range(1, 10), len(text)):
        assert read(make, text, block) == (content, "", calls), block


REASONING = [
    (False, "<think>why</think>so", "so", "why"),
    (False, "\n<think>\nwhy\n</think>\n\nso", "\n\nso", "\nwhy\n"),
    (False, "no tags <think>x</think>", "no tags <think>x</think>", ""),
    (False, "<thin", "<thin", ""),
    (True, "why</think>so", "so", "why"),
    (True, "<think>why</think>so", "so", "why"),
    (True, "cut off </thi", "", "cut off </thi"),
    (True, "", "", ""),
]


@pytest.mark.parametrize(("is_open", "text", "content", "reasoning"), REASONING)
def test_reasoning_whatever_the_block(is_open, text, content, reasoning):
    for block in range(1, 10):
        found = read(lambda: AnswerParser(None, ReasoningSplitter(is_open=is_open)), text, block)
        assert found == (content, reasoning, [])


def test_reasoning_then_a_call():
    text = f"<think>I <tool_call></think>Well.<tool_call>{call()}</tool_call>"
    for block in range(1, 10):
        found = read(lambda: AnswerParser(hermes(), ReasoningSplitter(is_open=False)), text, block)
        assert found == ("Well.", "I <tool_call>", [("get", TRICKY)])


def test_random_arguments_come_out_as_they_are_written():
    random_ = random.Random(5)

    def value(depth):
        kinds = [
            lambda: random_.choice([None, True, -3, 2.5e-3]),
            lambda: random_.choice(['"', "\\", "}{][,:", "\n é"]),
        ]
        if depth:
            kinds += [lambda: [value(depth - 1) for _ in range(random_.randrange(3))]]
            kinds += [lambda: {random_.choice(["name", "a", '"', "arguments"]): value(depth - 1) for _ in range(3)}]
        return random_.choice(kinds)()

    for _ in range(200):
        arguments = json.dumps({"x": value(4), "name": value(1)}, indent=random_.choice([None, 1]))
        keys = [f'"name": {json.dumps("get")}', f'"arguments": {arguments}', f'"other": {json.dumps(value(3))}']
        random_.shuffle(keys)
        text = f"<tool_call> {{{' , '.join(keys)}}} </tool_call>"
        assert read(hermes, text, random_.randrange(1, 30)) == ("", "", [("get", arguments)])


@pytest.mark.parametrize("seed", range(4))
def test_any_text_comes_out_the_same_in_any_pieces(seed):
    """Texts of the words that mean something: nothing is lost, and no cut matters."""
    random_ = random.Random(seed)
    words = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "get", ', '"arguments": {', "}", "]", '"',
             " ", "\n", "a", "\\", ";", "<", "1,"]  # fmt: skip
    for _ in range(150):
        text = "".join(random_.choices(words, k=random_.randrange(1, 14)))
        for make in (hermes, llama, lambda: AnswerParser(hermes(), ReasoningSplitter(is_open=True))):
            assert len({str(read(make, text, block)) for block in (1, 2, 3, 7, 99)}) == 1


def test_the_format_is_told_by_the_template():
    assert call_format_of("{{ tools | tojson }} <tool_call>") == "hermes"
    assert call_format_of('Respond {"name": name, "parameters": {}} {{ tools }}') == "llama3_json"
    assert knows_tools("{% if tools %}x{% endif %}")
    assert not knows_tools("{% for m in messages %}{{ m.content }}{% endfor %}")
