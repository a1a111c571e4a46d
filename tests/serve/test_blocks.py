"""Host. From verified blocks to chunks, through the engine's own commit: in blocks of 1 to 9 bytes the same answer."""

import asyncio
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxspec import SamplingParams
from jaxspec.engine.commit import Progress
from jaxspec.engine.request import Request, Sequence
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.scheduler.request import SequenceState
from jaxspec.serve.responses import Envelope, events, whole
from jaxspec.text.answer_parts import CALL_FORMATS, AnswerParser, CallList, NamedCall, ReasoningSplitter
from jaxspec.text.detokenizer import IncrementalDetokenizer
from jaxspec.text.tokenizer import Tokenizer
from tests.serve.test_chat_parts import joined

ARGUMENTS = '{"city": "Zürich 🏔️", "why": "<think> \\"}\\" é"}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
EOS = 256
CALL = [{"name": "weather", "arguments": ARGUMENTS}]


def reading(parser, is_open=False):
    return lambda: AnswerParser(parser(), ReasoningSplitter(is_open=is_open))


# The answer, what reads it, and its content, reasoning and calls.
ANSWERS = {
    "hermes": (f"<think>naïve 🎉 </thin</think>ok 🎉{HERMES}", reading(lambda: CALL_FORMATS["hermes"](["weather"])),
               "ok 🎉", "naïve 🎉 </thin", CALL),
    "llama 3": (f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
                reading(lambda: CALL_FORMATS["llama3_json"](["weather"])), "", "", CALL),
    "required": (f'[{{"name": "weather", "parameters": {ARGUMENTS}}}, {{"name": "weather", "parameters": {{}}}}]',
                 reading(lambda: CallList(["weather"])), "", "", [*CALL, {"name": "weather", "arguments": "{}"}]),
    "named": (f"héhé</think>{ARGUMENTS}", reading(lambda: NamedCall("weather"), is_open=True), "", "héhé", CALL),
    "no call": ("<tool_call>\n{\"name\": \"wé\"", reading(lambda: CALL_FORMATS["hermes"](["weather"])),
                '<tool_call>\n{"name": "wé"', "", []),
    "no tool": ("a 🎉 <think", AnswerParser, "a 🎉 <think", "", []),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    """A token for every byte, so that most characters here are made of several."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


async def outputs(tokenizer, text, block, **params):
    """What the engine gives for an answer that is verified in blocks."""
    token_ids = [*tokenizer.encode(text), EOS]
    settings = SamplingParams(max_tokens=len(token_ids), **params)
    progress = Progress(settings, frozenset({EOS}), len(token_ids), IncrementalDetokenizer(tokenizer, [65]))
    state = SequenceState("r-0", [65], 1 + len(token_ids))
    sequence = Sequence(0, state, progress, np.zeros(2, np.uint32), AcceptanceStats(8))
    request = Request("r", None, [65], settings, [sequence])
    for start in range(0, len(token_ids), block):
        one = token_ids[start : start + block]
        sequence.commit(one, len(one) - 1, len(one) - 1)
        yield 0, request.output()
        if request.is_finished:
            return


def streamed(tokenizer, text, new_parser, block, by_token=False, **params):
    """The chunks of a stream, as its client reads them."""

    async def run():
        given = outputs(tokenizer, text, block, **params)
        envelope = Envelope(model="m", is_chat=True, num_choices_per_prompt=1, prompt_lens=(1,), new_parser=new_parser)
        return [line async for line in events(envelope, [], given, by_token=by_token)]

    *lines, last = asyncio.run(run())
    assert last == "data: [DONE]\n\n"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_the_same_in_blocks_of_1_to_9(tokenizer, name):
    text, new_parser, content, reasoning, calls = ANSWERS[name]
    reason = "tool_calls" if calls else "stop"
    expected = ({"content": content, "reasoning_content": reasoning}, calls, [reason])
    for block in range(1, 10):
        assert joined(streamed(tokenizer, text, new_parser, block)) == expected
        assert joined(streamed(tokenizer, text, new_parser, block, by_token=True)) == expected
        for chunk in streamed(tokenizer, text, new_parser, block):
            assert "\ufffd" not in json.dumps(chunk, ensure_ascii=False)

        async def at_once(block=block):
            envelope = Envelope(
                model="m", is_chat=True, num_choices_per_prompt=1, prompt_lens=(1,), new_parser=new_parser
            )
            return await whole(envelope, outputs(tokenizer, text, block))

        body = asyncio.run(at_once())
        message = body["choices"][0]["message"]
        assert (message["content"] or "", message.get("reasoning_content", "")) == (content, reasoning)
        assert [call["function"] for call in message.get("tool_calls", [])] == calls
        assert body["usage"]["completion_tokens"] == len(text.encode()) + 1


@pytest.mark.parametrize("stop", ["🏔", 'ch 🏔️"', "think", "\n{", "ü"])
def test_a_stop_string_cuts_at_the_same_place(tokenizer, stop):
    text, new_parser, *_ = ANSWERS["hermes"]
    alone = joined(streamed(tokenizer, text[: text.index(stop)], new_parser, 1))[:2]
    for block in range(1, 10):
        assert joined(streamed(tokenizer, text, new_parser, block, stop=stop))[:2] == alone
