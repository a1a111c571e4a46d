"""Host. A token a chunk, tokens with their origins, and prompts echoed with log-probabilities, as lm-eval asks."""

import pytest

from tests.serve.fake import ANSWER, FakeEngine, ids, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def client():
    with serving(FakeEngine(block=4)) as client:
        yield client


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_chunk_for_every_token_if_asked(client, path):
    asked = HELLO if path == CHAT else {"prompt": "hello"}
    asked = asked | {"max_tokens": 9, "n": 2, "logprobs": True if path == CHAT else 1}
    chunks = client.stream(path, asked | {"stream_options": {"one_token_per_chunk": True}})
    texts, num_logprobs, reasons = [[], []], 0, []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text = choice["text"] if path == COMPLETIONS else choice["delta"]["content"]
        texts[choice["index"]] += [text] if text else []
        if choice["logprobs"] is not None:
            num_logprobs += len(choice["logprobs"]["content" if path == CHAT else "tokens"])
        reasons += [(choice["index"], choice["finish_reason"])] if choice["finish_reason"] else []
    assert texts == [list(ANSWER[:9]), list(ANSWER[1:10])]
    assert num_logprobs == 18
    assert reasons == [(0, "length"), (1, "length")]


def test_usage_in_every_chunk_if_asked(client):
    chunks = client.stream(
        COMPLETIONS, {"prompt": "hi", "max_tokens": 6, "stream_options": {"continuous_usage_stats": True}}
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [4, 6]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_tokens_say_where_they_come_from(client, path, streamed):
    asked = (HELLO if path == CHAT else {"prompt": "hello"}) | {"max_tokens": 6, "return_token_origins": True}
    if streamed:
        tokens = [t for chunk in client.stream(path, asked) for c in chunk["choices"] for t in c["tokens"]]
    else:
        tokens = client.post(path, asked).json["choices"][0]["tokens"]
    origins = ["accepted"] * 3 + ["bonus"] + ["accepted", "bonus"]
    assert tokens == [
        {"id": token_id, "text": letter, "origin": origin}
        for token_id, letter, origin in zip(ids(ANSWER[:6]), ANSWER[:6], origins, strict=True)
    ]


def logprobs_of(letters):
    """What the fake engine says of tokens after the first, the likeliest one beside each."""
    return [-2.0] * len(letters), [{"a": -9999.0, letter: -2.0} for letter in letters]


@pytest.mark.parametrize("prompt", ["cab", ids("cab")])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_lm_eval_scores_a_text(client, prompt, max_tokens):
    """Its harness sends these fields, and reads token_logprobs and top_logprobs from the context's length on."""
    asked = {"model": "fake", "prompt": [prompt, prompt], "temperature": 0, "max_tokens": max_tokens, "logprobs": 1,
             "seed": 1234, "echo": True}  # fmt: skip
    body = client.post(COMPLETIONS, asked).json
    text = "cab" + "t" * max_tokens
    chosen, likeliest = logprobs_of(text[1:])
    assert [choice["text"] for choice in body["choices"]] == [text] * 2
    for choice in body["choices"]:
        assert choice["logprobs"] == {
            "tokens": list(text),
            "token_logprobs": [None, *chosen],
            "top_logprobs": [None, *likeliest],
            "text_offset": list(range(len(text))),
        }
        assert "prompt_logprobs" not in choice
        assert choice["finish_reason"] == "length"
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 2 * max_tokens)
    assert usage["total_tokens"] == 6 + 2 * max_tokens


@pytest.mark.parametrize("by_token", [False, True])
def test_an_echo_streams(client, by_token):
    asked = {"prompt": "cab", "max_tokens": 5, "echo": True, "logprobs": 0, "n": 2}
    whole = client.post(COMPLETIONS, asked).json["choices"]
    chunks = client.stream(COMPLETIONS, asked | {"stream_options": {"one_token_per_chunk": by_token}})
    for choice in whole:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"] == "cab" + (ANSWER * 2)[choice["index"] :][:5]
        for key, value in choice["logprobs"].items():
            assert [one for part in parts for one in part["logprobs"][key]] == value
    assert whole[0]["logprobs"]["token_logprobs"] == [None] + [-2.0] * 7


def test_an_echo_without_logprobs_is_text_alone(client):
    body = client.post(COMPLETIONS, {"prompt": "cab", "max_tokens": 0, "echo": True}).json
    assert (body["choices"][0]["text"], body["choices"][0]["logprobs"]) == ("cab", None)
    assert body["usage"]["completion_tokens"] == 0
    assert (
        client.post(COMPLETIONS, {"prompt": "cab", "max_tokens": 2, "echo": True}).json["choices"][0]["text"] == "cabth"
    )


def test_two_tokens_of_one_text_are_both_there():
    """Half characters look alike; who looks for the largest log-probability must not find a smaller one."""
    from jaxspec.engine.outputs import Logprob
    from jaxspec.serve.logprobs import completion_logprobs

    entry = {7: Logprob(-3.0, 2, "\ufffd"), 9: Logprob(-0.1, 1, "\ufffd")}
    assert completion_logprobs([entry], 1, 0)["top_logprobs"] == [{"\ufffd": -3.0, "token_id:9": -0.1}]
