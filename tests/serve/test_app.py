"""Host. The routes over an engine whose answers are known: shapes, usage, refusals, and clients that leave."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxspec.config.server import ServerConfig
from jaxspec.errors import CapacityError, QueueFullError
from tests.serve.fake import ANSWER, LETTERS, LIMIT, FakeEngine, ids, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def client(engine):
    with serving(engine) as client:
        yield client


@pytest.fixture(scope="module")
def lasting_client():
    """One server for the many requests that must not harm it."""
    with serving(FakeEngine()) as client:
        yield client


def wait_for(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def test_a_completion(client, engine):
    body = client.post(COMPLETIONS, {"model": "fake", "prompt": "hello", "max_tokens": 9}).json
    assert body["object"] == "text_completion"
    assert body["model"] == "fake"
    assert body["choices"] == [
        {"index": 0, "text": ANSWER[:9], "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 4}
    }  # fmt: skip
    assert body["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 6
    assert engine.prompts == [ids("hello")]
    assert engine.running == set()
    assert engine.aborted == []


def test_a_chat(client, engine):
    body = client.post(CHAT, HELLO).json
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER}
    assert choice["finish_reason"] == "stop"
    prompt = "user:hello\nassistant:"
    assert engine.prompts == [ids(prompt)]
    assert body["usage"] == {
        "prompt_tokens": len(prompt), "completion_tokens": len(ANSWER), "total_tokens": len(prompt) + len(ANSWER),
        "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip
    # without a limit a chat answer may fill the context
    assert engine.params[0].max_tokens == LIMIT - len(prompt)


@pytest.mark.parametrize("block", range(1, 10))
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_joins_to_the_whole_whatever_the_block(client, engine, path, block):
    asked = HELLO if path == CHAT else {"prompt": "hello"}
    asked = asked | {"max_tokens": 20, "n": 2}
    engine.block = block
    whole = client.post(path, asked).json
    chunks = client.stream(path, asked | {"stream_options": {"include_usage": True}})
    assert len({chunk["id"] for chunk in chunks}) == 1
    *parts, last = chunks
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["metrics"] == whole["metrics"]
    assert all(part["usage"] is None for part in parts)
    texts, reasons = ["", ""], [[], []]
    for part in parts:
        for choice in part["choices"]:
            texts[choice["index"]] += choice["delta"]["content"] if path == CHAT else choice["text"]
            if choice["finish_reason"] is not None:
                reasons[choice["index"]].append(choice["finish_reason"])
    get_text = (lambda c: c["message"]["content"]) if path == CHAT else (lambda c: c["text"])
    assert texts == [get_text(choice) for choice in whole["choices"]]
    assert texts == [ANSWER[:20], ANSWER[1:21]]
    assert reasons == [["length"], ["length"]]
    if path == CHAT:
        roles = [c["delta"]["role"] for part in parts for c in part["choices"] if "role" in c["delta"]]
        assert roles == ["assistant", "assistant"]
        assert {part["object"] for part in parts} == {"chat.completion.chunk"}


def test_a_stream_without_usage_says_none(client):
    chunks = client.stream(COMPLETIONS, {"prompt": "hello", "max_tokens": 4})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["the", " "]
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ["hi"]),
        (["hi", "you"], ["hi", "you"]),
        (ids("hi"), ["hi"]),
        ([ids("hi"), ids("you")], ["hi", "you"]),
    ],
)
def test_every_form_of_prompt(client, engine, prompt, expected):
    body = client.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 5, "n": 2}).json
    assert sorted(engine.prompts) == sorted(map(ids, expected))
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (2 * i + j, ANSWER[j : j + 5]) for i in range(len(expected)) for j in range(2)
    ]
    assert body["usage"]["prompt_tokens"] == len("".join(expected))
    assert body["usage"]["completion_tokens"] == 5 * 2 * len(expected)


def test_sampling_parameters_reach_the_engine(client, engine):
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "stop": ["x"], "max_tokens": 4,
             "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [5]}  # fmt: skip
    assert client.post(COMPLETIONS, given | {"prompt": "hi", "n": None, "presence_penalty": None}).status == 200
    (params,) = engine.params
    expected = given | {"stop": ("x",), "stop_token_ids": (5,)}
    assert {key: getattr(params, key) for key in given} == expected


def test_defaults_are_openai_s(client, engine):
    client.post(COMPLETIONS, {"prompt": "hi"})
    client.post(COMPLETIONS, {"prompt": "h" * (LIMIT - 4)})
    client.post(CHAT, HELLO | {"max_completion_tokens": 3})
    assert [params.max_tokens for params in engine.params] == [16, 4, 3]
    assert engine.params[0].temperature == 1.0


def test_message_content_may_come_in_parts(client, engine):
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    client.post(CHAT, {"messages": [{"role": "user", "content": parts}]})
    client.post(CHAT, HELLO)
    assert engine.prompts[0] == engine.prompts[1]


P, M = {"prompt": "hi"}, HELLO


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [""]}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": 5}, "prompt"),
        (COMPLETIONS, {"prompt": {"text": "hi"}}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "hi"]}, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, "prompt"),
        (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [10**30]}, "prompt"),
        (COMPLETIONS, {"prompt": "h" * LIMIT}, "prompt"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt"),
        (COMPLETIONS, P | {"max_tokens": LIMIT - 1}, "max_tokens"),
        (COMPLETIONS, P | {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, P | {"max_tokens": "4"}, "max_tokens"),
        (COMPLETIONS, P | {"temperature": -1}, "temperature"),
        (COMPLETIONS, P | {"temperature": "hot"}, "temperature"),
        (COMPLETIONS, P | {"top_p": 0}, "top_p"),
        (COMPLETIONS, P | {"top_k": -5}, "top_k"),
        (COMPLETIONS, P | {"min_p": 2}, "min_p"),
        (COMPLETIONS, P | {"n": 0}, "n"),
        (COMPLETIONS, P | {"n": 257}, "n"),
        (COMPLETIONS, {"prompt": ["hi"] * 20, "n": 20}, "n"),
        (COMPLETIONS, P | {"seed": "x"}, "seed"),
        (COMPLETIONS, P | {"stop": 5}, "stop"),
        (COMPLETIONS, P | {"stop_token_ids": ["a"]}, "stop_token_ids"),
        (COMPLETIONS, P | {"logprobs": -2}, "logprobs"),
        (COMPLETIONS, P | {"logprobs": True}, "logprobs"),
        (COMPLETIONS, P | {"prompt_logprobs": "all"}, "prompt_logprobs"),
        (COMPLETIONS, P | {"echo": 1}, "echo"),
        (COMPLETIONS, {"prompt": [-1], "echo": True}, "prompt"),
        (COMPLETIONS, {"prompt": [10**30], "echo": True}, "prompt"),
        (COMPLETIONS, P | {"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "echo"),
        (COMPLETIONS, P | {"echo": True, "max_tokens": False}, "max_tokens"),
        (COMPLETIONS, P | {"best_of": 4}, "best_of"),
        (COMPLETIONS, P | {"suffix": "x"}, "suffix"),
        (COMPLETIONS, P | {"presence_penalty": 2.5}, "presence_penalty"),
        (COMPLETIONS, P | {"frequency_penalty": "1"}, "frequency_penalty"),
        (COMPLETIONS, P | {"repetition_penalty": 0}, "repetition_penalty"),
        (COMPLETIONS, P | {"logit_bias": {"5": 101}}, "logit_bias"),
        (COMPLETIONS, P | {"logit_bias": {"five": 1}}, "logit_bias"),
        (COMPLETIONS, P | {"logit_bias": [5]}, "logit_bias"),
        (COMPLETIONS, P | {"bad_words": [""]}, "bad_words"),
        (COMPLETIONS, P | {"allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETIONS, P | {"speculative": {"enabled": 1}}, "speculative"),
        (COMPLETIONS, P | {"speculative": {"num_speculative_tokens": -1}}, "speculative"),
        (COMPLETIONS, P | {"speculative": {"k": 2}}, "speculative"),
        (COMPLETIONS, P | {"response_format": {"type": "grammar"}}, "response_format"),
        (COMPLETIONS, P | {"stream": "yes"}, "stream"),
        (COMPLETIONS, P | {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, P | {"stream": True, "stream_options": {"usage": True}}, "stream_options"),
        (COMPLETIONS, P | {"temprature": 1}, "temprature"),
        (COMPLETIONS, P | {"sampling": {"n": 2}}, "sampling"),
        (COMPLETIONS, P | {"messages": []}, "messages"),
        (COMPLETIONS, P | {"model": 5}, "model"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "hi", "mood": "good"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "h" * LIMIT}]}, "messages"),
        (CHAT, M | {"prompt": "hi"}, "prompt"),
        (CHAT, M | {"logprobs": 3}, "logprobs"),
        (CHAT, M | {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, M | {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, M | {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, M | {"tool_choice": "auto"}, "tool_choice"),
        (CHAT, M | {"echo": True}, "echo"),
        (CHAT, M | {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, M | {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        (CHAT, M | {"max_completion_tokens": "4"}, "max_completion_tokens"),
        (CHAT, M | {"chat_template": "{{ 1 }}"}, "chat_template"),
        (CHAT, M | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, M | {"chat_template_kwargs": {"self": 1}}, "messages"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "hi", "messages": M["messages"]}, "prompt"),
        ("/tokenize", {"prompt": "hi", "tokens": []}, "tokens"),
        ("/detokenize", {"tokens": "hi"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
    ],
)
def test_bad_input_is_a_400_that_names_its_field(lasting_client, path, body, param):
    streams = path.startswith("/v1") and "stream" not in body and "stream_options" not in body
    for asked in (body, body | {"stream": True}) if streams else (body,):
        response = lasting_client.post(path, asked)
        assert response.status == 400, response.text
        assert response.json["error"]["param"] == param
        assert response.json["error"]["type"] == "invalid_request_error"
        assert response.json["error"]["message"]
    assert lasting_client.post(COMPLETIONS, P).status == 200


def test_a_misspelt_field_hears_its_neighbours(client):
    message = client.post(COMPLETIONS, P | {"temprature": 1}).json["error"]["message"]
    assert "did you mean temperature" in message


def test_values_that_ask_for_nothing_are_accepted(client):
    neutral = {"echo": False, "best_of": 1, "logprobs": None, "user": "me", "response_format": {"type": "text"},
               "suffix": None, "presence_penalty": 0.0, "logit_bias": None}  # fmt: skip
    assert client.post(COMPLETIONS, P | neutral).status == 200
    neutral = {"logprobs": False, "tools": None, "tool_choice": "none", "top_logprobs": None, "store": False}
    assert client.post(CHAT, M | neutral).status == 200


@pytest.mark.parametrize(
    ("raw", "status"),
    [(b"", 400), (b"{", 400), (b"[]", 400), (b'"hi"', 400), (b"\xff", 400), (b"[" * 100_000, 400),
     (b'{"prompt": "hi", "max_tokens": ' + b"9" * 5000 + b"}", 400), (b" " * 5000, 413)],
)  # fmt: skip
def test_bodies_that_are_no_request(engine, raw, status):
    limit = 200_000 if len(raw) != 5000 else 4999
    with serving(engine, ServerConfig(max_body_bytes=limit)) as client:
        response = client.post(COMPLETIONS, raw)
        assert response.status == status, response.text
        assert response.json["error"]["message"]
        assert client.post(COMPLETIONS, P).status == 200


def test_a_body_too_large_is_refused_however_it_is_sent(engine):
    with serving(engine, ServerConfig(max_body_bytes=2000)) as client:
        assert client.post(COMPLETIONS, {"prompt": "h" * 3000}).status == 413
        with socket.create_connection(("127.0.0.1", client.port), timeout=10) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(4):
                raw.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
            raw.sendall(b"0\r\n\r\n")
            assert b" 413 " in raw.recv(1000)


def test_wrong_doors(client):
    assert client.get("/nowhere").status == 404
    assert client.get("/nowhere").json["error"]["message"]
    response = client.get(COMPLETIONS)
    assert response.status == 405
    assert response.headers["allow"] == "POST"
    assert client.post("/health", {}).status == 405
    response = client.post(COMPLETIONS, P | {"model": "other"})
    assert response.status == 404
    assert (response.json["error"]["param"], response.json["error"]["code"]) == ("model", "model_not_found")
    for path, body in ((CHAT, M), ("/tokenize", P), ("/detokenize", {"tokens": [1]})):
        assert client.post(path, body | {"model": "other"}).status == 404


def test_models(client):
    (model,) = client.get("/v1/models").json["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", LIMIT)


def test_tokens_there_and_back(client):
    body = client.post("/tokenize", {"prompt": "hello", "return_token_strs": True}).json
    assert body == {"count": 5, "max_model_len": LIMIT, "tokens": ids("hello"), "token_strs": list("hello")}
    assert client.post("/detokenize", {"tokens": body["tokens"]}).json == {"prompt": "hello"}
    assert client.post("/detokenize", {"tokens": []}).json == {"prompt": ""}
    rendered = client.post("/tokenize", M).json
    assert "".join(LETTERS[token_id] for token_id in rendered["tokens"]) == "user:hello\nassistant:"


def test_health_is_green_only_when_requests_are_served(client, engine):
    engine.is_ready = False
    assert client.get("/health").status == 503
    assert client.get("/metrics").status == 200
    for method, path, body in (("POST", COMPLETIONS, P), ("POST", CHAT, M), ("GET", "/v1/models", None)):
        response = client.request(method, path, body)
        assert response.status == 503
        assert response.json["error"]["type"] == "server_error"
    engine.is_ready = True
    assert client.get("/health").status == 200
    engine.is_healthy = False
    assert client.get("/health").status == 503
    assert client.post(COMPLETIONS, P).status == 503


def test_an_engine_s_failure_tells_nothing_away_and_the_server_survives(client, engine, caplog):
    engine.fail_after_steps = 0
    for body in (P, P | {"stream": True}):
        response = client.post(COMPLETIONS, body)
        assert response.status == 500
        assert "secret" not in response.text
    engine.fail_after_steps = 1
    assert client.post(COMPLETIONS, P).status == 500
    *chunks, error = client.stream(COMPLETIONS, P)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["the"]
    assert error["error"]["type"] == "server_error"
    assert "secret" in caplog.text
    assert engine.running == set()
    engine.fail_after_steps = None
    assert client.post(COMPLETIONS, P).status == 200


def test_one_bad_prompt_of_many_ends_them_all(client, engine):
    engine.hold = True
    response = client.post(COMPLETIONS, {"prompt": [ids("hi"), [1000], ids("you")]})
    assert (response.status, response.json["error"]["param"]) == (400, "prompt")
    wait_for(lambda: not engine.running)


def start_and_leave(client, body, until):
    """Send a request, wait for `until`, and hang up."""
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        if body.get("stream"):
            assert b"the" in connection.recv(4096)
        wait_for(until)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("prompt", ["hi", ["hi", "you", "all"]])
def test_who_leaves_frees_the_row_and_others_go_on(client, engine, streamed, prompt):
    engine.hold = True
    others = []
    other = threading.Thread(
        target=lambda: others.append(client.post(COMPLETIONS, {"prompt": "stay", "max_tokens": 9}))
    )
    other.start()
    wait_for(lambda: len(engine.running) == 1)
    num_leaving = 1 if isinstance(prompt, str) else len(prompt)
    start_and_leave(
        client, {"prompt": prompt, "stream": streamed}, until=lambda: len(engine.running) == 1 + num_leaving
    )
    wait_for(lambda: len(engine.running) == 1)
    assert len(engine.aborted) == num_leaving
    engine.hold = False
    other.join()
    assert others[0].json["choices"][0]["text"] == ANSWER[:9]
    assert len(engine.aborted) == num_leaving


def test_many_at_once(client, engine):
    lengths = [1 + 3 * i for i in range(12)]

    def ask(length):
        return client.post(COMPLETIONS, {"prompt": "hi", "max_tokens": length}).json["choices"][0]["text"]

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, lengths)) == [ANSWER[:length] for length in lengths]
    assert engine.aborted == []


def test_a_scrape_agrees_with_the_responses(client):
    def scrape():
        families = text_string_to_metric_families(client.get("/metrics").text)
        return {s.name: s.value for f in families for s in f.samples if "per_pos" not in s.name}

    before = scrape()
    totals = {"num_spec_steps": 0, "num_draft_tokens": 0, "num_accepted_draft_tokens": 0, "num_output_tokens": 0}
    for n in (1, 3):
        for prompt in ("hi", ["hi", "you"]):
            figures = client.post(COMPLETIONS, {"prompt": prompt, "n": n}).json["metrics"]["speculative_decoding"]
            totals = {key: totals[key] + figures[key] for key in totals}
    after = scrape()
    names = {
        "num_spec_steps": "vllm:spec_decode_num_drafts_total",
        "num_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
        "num_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens_total",
        "num_output_tokens": "vllm:generation_tokens_total",
    }
    assert {key: after[name] - before[name] for key, name in names.items()} == totals
    assert totals["num_output_tokens"] == 16 * (1 + 2 + 3 + 6)


def test_a_full_queue_is_told_apart_from_what_never_fits(client, engine):
    engine.fail_after_steps = 0
    for failure, status in ((QueueFullError("later"), 429), (CapacityError("never"), 400)):
        engine.failure = failure
        for more in ({}, {"stream": True}):
            response = client.post(COMPLETIONS, P | more)
            assert (response.status, response.json["error"]["message"]) == (status, str(failure))


def test_priority_and_salt_reach_the_engine(client, engine):
    client.post(COMPLETIONS, P | {"priority": -2, "cache_salt": "mine"})
    client.post(CHAT, HELLO)
    assert (engine.priorities, engine.salts) == ([-2, 0], ["mine", None])
    response = client.post(COMPLETIONS, P | {"priority": "high"})
    assert (response.status, response.json["error"]["param"]) == (400, "priority")


def test_an_api_key_guards_what_answers(engine):
    with serving(engine, ServerConfig(api_key="sesame")) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
            response = client.post(COMPLETIONS, P, headers=headers)
            assert response.status == 401
            assert response.json["error"]["message"]
        assert client.post(COMPLETIONS, P, headers={"Authorization": "Bearer sesame"}).status == 200
        assert client.get("/health").status == 200


def test_a_model_without_tokenizer_takes_ids_only(client, engine):
    engine.tokenizer = None
    assert client.post(COMPLETIONS, {"prompt": ids("hi")}).status == 200
    response = client.post(COMPLETIONS, P)
    assert (response.status, response.json["error"]["param"]) == (400, "prompt")
