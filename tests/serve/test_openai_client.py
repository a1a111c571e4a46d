"""Host. OpenAI's own client: whole, streamed, async, tools, JSON schemas, errors; what it reads is what was sent."""

import asyncio

import pytest

from jaxspec.config.server import ServerConfig
from jaxspec.errors import QueueFullError
from tests.serve.fake import ANSWER, FakeEngine, serving
from tests.serve.test_chat_parts import ALL_LETTERS, ARGUMENTS, CALL, TEMPLATE, TOOLS

openai = pytest.importorskip("openai", reason="openai is not installed (requirements/dev.txt)")

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served():
    engine = FakeEngine()
    with serving(engine, ServerConfig(api_key="sesame")) as client:
        yield engine, client.port


@pytest.fixture
def client(served):
    with connect(openai.OpenAI, served[1]) as client:
        yield client


def connect(kind, port, **options):
    return kind(base_url=f"http://127.0.0.1:{port}/v1", **({"api_key": "sesame", "max_retries": 0} | options))


def test_completions_and_chats(client):
    assert client.models.list().data[0].id == "fake"
    assert client.models.retrieve("fake").id == "fake"
    completion = client.completions.create(model="fake", prompt=["hi", "you"], max_tokens=5, logprobs=1, seed=3)
    assert [choice.text for choice in completion.choices] == [ANSWER[:5]] * 2
    assert completion.usage.total_tokens == 5 + 10
    assert completion.choices[0].logprobs.token_logprobs == [-2.0] * 5
    chat = client.chat.completions.create(
        model="fake", messages=HELLO, n=2, logprobs=True, top_logprobs=2, max_completion_tokens=6, stop=["zebra"],
        extra_body={"top_k": 5, "repetition_penalty": 1.1, "speculative": {"enabled": False}},
    )  # fmt: skip
    assert [choice.message.content for choice in chat.choices] == [ANSWER[:6], ANSWER[1:7]]
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
    assert chat.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] == 8


def test_streams(client):
    asked = {"model": "fake", "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(prompt="hi", **asked))
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == ANSWER[:20]
    assert chunks[-1].usage.completion_tokens == 20
    chunks = list(client.chat.completions.create(messages=HELLO, **asked))
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == ANSWER[:20]
    with client.chat.completions.stream(model="fake", messages=HELLO) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_async_and_who_stops_reading(served):
    engine, port = served

    async def run():
        async with connect(openai.AsyncOpenAI, port) as client:
            asked = {"model": "fake", "messages": HELLO}
            answers = await asyncio.gather(
                *(client.chat.completions.create(max_tokens=i, **asked) for i in range(1, 9))
            )
            engine.hold = True
            stream = await client.chat.completions.create(stream=True, **asked)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            for _ in range(500):
                if not engine.running:
                    break
                await asyncio.sleep(0.01)
            engine.hold = False
            return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(run()) == [ANSWER[:i] for i in range(1, 9)]
    assert engine.running == set()


@pytest.mark.parametrize("block", [1, 7])
def test_tools(block):
    engine = FakeEngine(block, 600, answer=CALL, letters=ALL_LETTERS, chat_template=TEMPLATE)
    with serving(engine) as server, connect(openai.OpenAI, server.port) as client:
        asked = {"model": "fake", "messages": HELLO, "tools": TOOLS}
        choice = client.chat.completions.create(**asked).choices[0]
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments, choice.finish_reason) == (
            "weather",
            ARGUMENTS,
            "tool_calls",
        )
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed.function.arguments == ARGUMENTS
        # The next turn, with the answer as the client has it.
        answer = {"role": "tool", "tool_call_id": call.id, "content": "mild"}
        turns = [*HELLO, choice.message.model_dump(), answer]
        assert client.chat.completions.create(model="fake", messages=turns, tools=TOOLS).choices


def test_a_json_schema_is_parsed():
    pydantic = pytest.importorskip("pydantic")

    class City(pydantic.BaseModel):
        name: str

    engine = FakeEngine(answer='{"name": "Rome"}', letters=ALL_LETTERS)
    with serving(engine) as server, connect(openai.OpenAI, server.port) as client:
        chat = client.chat.completions.parse(model="fake", messages=HELLO, response_format=City)
    assert chat.choices[0].message.parsed == City(name="Rome")
    assert '"name"' in engine.params[0].structured_outputs.json


def test_errors_have_the_client_s_classes(served):
    engine, port = served
    with connect(openai.OpenAI, port, api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with connect(openai.OpenAI, port) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="fake", prompt="hi", temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="hi")
        engine.failure, engine.fail_after_steps = QueueFullError("full"), 0
        try:
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="fake", prompt="hi")
        finally:
            engine.failure, engine.fail_after_steps = RuntimeError("secret detail"), None
