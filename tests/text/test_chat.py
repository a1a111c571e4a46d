"""Host. Chat templates: the same text as transformers renders, and a sandbox that holds."""

import pytest

from jaxspec.errors import RequestError
from jaxspec.text.chat import render_chat

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{% set loop_messages = messages %}
{%- for message in loop_messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim %}
    {%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
    {{- content }}
{%- endfor %}
{%- if tools is defined and tools %}
    {{- "Tools: " + (tools | tojson(indent=2)) }}
{%- endif %}
"""
STRICT = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}
{% endif %}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}
{% else %}[INST] {{ message['content'] }} [/INST]{% endif %}
{% endfor %}"""
BREAKING = (
    "{% for message in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ message | tojson }}{% endfor %}"
)

USER = {"role": "user", "content": "Hi <b>there</b> & 你好 \n"}
ASSISTANT = {"role": "assistant", "content": "Hello."}
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"a": [1, None, True]}}}]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, STRICT, BREAKING], ids=["chatml", "llama3", "strict", "breaking"])
@pytest.mark.parametrize("messages", [[USER], [USER, ASSISTANT, USER]])
@pytest.mark.parametrize("variables", [{}, {"tools": TOOLS}, {"add_generation_prompt": True}])
def test_renders_as_transformers_does(template, messages, variables):
    module = pytest.importorskip("transformers.utils.chat_template_utils")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = module.render_jinja_template([messages], chat_template=template, **tokens, **variables)
    assert render_chat(template, messages, **tokens, **variables) == expected[0]


def test_published_template(smollm2):
    text = smollm2.apply_chat_template([{"role": "system", "content": "S"}, USER], add_generation_prompt=False)
    assert text == f"<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n{USER['content']}<|im_end|>\n"


def test_text_parts_become_text_and_nulls_are_absent():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    assert render_chat("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb\nc"
    template = "{% if messages[0].content is defined %}yes{% else %}no{% endif %}"
    assert render_chat(template, [{"role": "assistant", "content": None}]) == "no"


def test_a_variable_may_have_any_name():
    assert render_chat("{{ template }}", [USER], template="a name of ours") == "a name of ours"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        (["hi"], "messages[0]"),
        ([USER, {"content": "x"}], "messages[1]"),
        ([USER, {"role": 3, "content": "x"}], "messages[1]"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["a", {"type": "text", "text": 5}]}], "messages[0].content[1]"),
    ],
)
def test_malformed_messages_are_refused_by_name(messages, param):
    with pytest.raises(RequestError) as caught:
        render_chat(CHATML, messages)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_a_template_may_refuse_or_fail():
    with pytest.raises(RequestError, match="must alternate"):
        render_chat(STRICT, [USER, USER], bos_token="", eos_token="")
    with pytest.raises(RequestError, match="cannot render"):
        render_chat(CHATML, [{"role": "user"}])  # no content to add
    with pytest.raises(RequestError, match="does not parse"):
        render_chat("{% if %}", [USER])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(3) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
    ],
)
def test_the_sandbox_holds(template):
    """Forbidden attributes are undefined, which renders as nothing or fails; changes are refused."""
    messages = [dict(USER)]
    try:
        text = render_chat(template, messages)
    except RequestError:
        text = ""
    assert text == ""
    assert messages == [USER]
