"""Host. The grammar of a forced call lets calls of the tools through and nothing else."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxspec.errors import RequestError
from jaxspec.sampling.grammar import GrammarCompiler
from jaxspec.serve.protocol import ChatRequest, parse
from jaxspec.text.tokenizer import Tokenizer
from tests.serve.test_chat_parts import TOOLS

# The letters that calls of these tools are written with, a token each, as byte-level tokenizers spell them.
LETTERS = sorted(set('[]{}":, weathertimenameparameterscityABab0\\'))
EOS = len(LETTERS)


@pytest.fixture(scope="module")
def compiler():
    spelt = [letter.replace(" ", "Ġ") for letter in LETTERS]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate([*spelt, "</s>"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return GrammarCompiler(Tokenizer(backend, eos_token="</s>"), EOS + 1, (EOS,))


def takes(compiler, text, **fields):
    """Whether the grammar of such a request allows the whole text."""
    wanted = parse(ChatRequest, {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS} | fields)
    state = compiler.compile(wanted.tool_use().structured_outputs()).start()
    try:
        for letter in text:
            state.commit(LETTERS.index(letter))
    except RequestError:
        return False
    return state.has_ended or bool(state.allowed() is None or state.allowed()[EOS])


WEATHER = '{"name": "weather", "parameters": {"city": "Ab"}}'
TIME = '{"name": "time", "parameters": {}}'
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        (f"[{WEATHER}]", {"tool_choice": "required"}, True),
        (f"[{WEATHER}, {TIME}]", {"tool_choice": "required"}, True),
        (f"[{WEATHER}, {TIME}]", {"tool_choice": "required", "parallel_tool_calls": False}, False),
        (f"[{TIME}]", {"tool_choice": "required", "parallel_tool_calls": False}, True),
        ("[]", {"tool_choice": "required"}, False),
        (WEATHER, {"tool_choice": "required"}, False),
        ('[{"name": "rate", "parameters": {}}]', {"tool_choice": "required"}, False),
        ('[{"name": "weather", "parameters": {}}]', {"tool_choice": "required"}, False),
        ('[{"name": "weather", "parameters": {"city": 0}}]', {"tool_choice": "required"}, False),
        ('{"city": "Ab"}', {"tool_choice": NAMED}, True),
        ('{"city": 0}', {"tool_choice": NAMED}, False),
        (WEATHER, {"tool_choice": NAMED}, False),
    ],
)
def test_what_a_forced_call_may_be(compiler, text, fields, expected):
    assert takes(compiler, text, **fields) is expected
