"""Host. Log-probabilities in OpenAI's shapes: whole, streamed in any blocks, of prompts; JSON without infinities."""

import pytest

from tests.serve.fake import ANSWER, FakeEngine, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("block", [1, 3, 7])
def test_a_completions_logprobs(block):
    asked = {"prompt": "hello", "max_tokens": 5, "n": 2, "logprobs": 2}
    with serving(FakeEngine(block)) as client:
        whole = client.post(COMPLETIONS, asked).json
        chunks = client.stream(COMPLETIONS, asked)
    for choice in whole["choices"]:
        text = choice["text"]
        assert choice["logprobs"] == {
            "tokens": list(text),
            "token_logprobs": [-2.0] * 5,
            "top_logprobs": [{letter: -2.0, "a": -9999.0} | ({"b": -2.0}) for letter in text],
            "text_offset": [0, 1, 2, 3, 4],
        }
        parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        for key, value in choice["logprobs"].items():
            assert [one for part in parts for one in part[key]] == value


@pytest.mark.parametrize("block", [1, 3, 7])
def test_a_chats_logprobs(block):
    asked = HELLO | {"max_tokens": 5, "logprobs": True, "top_logprobs": 1}
    with serving(FakeEngine(block)) as client:
        whole = client.post(CHAT, asked).json["choices"][0]["logprobs"]
        chunks = client.stream(CHAT, asked)
    a = {"token": "a", "logprob": -9999.0, "bytes": [97]}
    assert whole == {
        "content": [
            {"token": letter, "logprob": -2.0, "bytes": list(letter.encode()), "top_logprobs": [a]}
            for letter in ANSWER[:5]
        ],
        "refusal": None,
    }
    parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"]]
    assert parts[0] is None, "the chunk with the role has none"
    assert [one for part in parts[1:] for one in part["content"]] == whole["content"]


def test_the_emitted_token_alone():
    with serving(FakeEngine()) as client:
        chat = client.post(CHAT, HELLO | {"max_tokens": 2, "logprobs": True}).json["choices"][0]["logprobs"]
        completion = client.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2, "logprobs": 0}).json["choices"][0][
            "logprobs"
        ]
        without = client.post(CHAT, HELLO | {"max_tokens": 2}).json["choices"][0]["logprobs"]
    assert [entry["top_logprobs"] for entry in chat["content"]] == [[], []]
    assert completion["top_logprobs"] == [None, None]
    assert without is None


def test_a_prompts_logprobs():
    with serving(FakeEngine()) as client:
        body = client.post(COMPLETIONS, {"prompt": ["cab", "d"], "max_tokens": 1, "prompt_logprobs": 0}).json
        chat = client.post(CHAT, HELLO | {"max_tokens": 1, "prompt_logprobs": 0}).json
        refused = client.post(COMPLETIONS, {"prompt": "cab", "prompt_logprobs": 0, "stream": True})
    assert body["choices"][0]["prompt_logprobs"] == [
        None,
        {"0": {"logprob": -2.0, "rank": 2, "decoded_token": "a"}},
        {"1": {"logprob": -2.0, "rank": 2, "decoded_token": "b"}},
    ]
    assert body["choices"][1]["prompt_logprobs"] == [None]
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert refused.status == 400
    assert refused.json["error"]["param"] == "prompt_logprobs"
