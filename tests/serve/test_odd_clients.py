"""Host. Clients that speak HTTP oddly, badly or halfway: they are answered or refused, and nobody else notices."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from jaxspec.config.server import ServerConfig
from tests.serve.fake import ANSWER, CHAT_TEMPLATE, FakeEngine, serving
from tests.serve.test_fuzz import deep

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
P = {"prompt": "hi", "max_tokens": 16}
TEXT = ANSWER[:16]


@pytest.fixture(scope="module")
def served():
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
    engine = FakeEngine(max_model_len=50_000, chat_template=template)
    with serving(engine, ServerConfig(max_body_bytes=2**20)) as client:
        yield engine, client


@pytest.fixture(autouse=True)
def nobody_notices(request, caplog):
    """After each test the server answers as before, nothing runs, and its log has no error."""
    yield
    if "served" not in request.fixturenames:
        return
    engine, client = request.getfixturevalue("served")
    engine.hold = False
    assert client.post(COMPLETIONS, P).json["choices"][0]["text"] == TEXT
    wait_for(lambda: not engine.running)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ask(path=COMPLETIONS, version=b"1.1", headers=b"", **body):
    raw = json.dumps(P | body).encode()
    head = b"POST %s HTTP/%s\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n" % (path.encode(), version, len(raw), headers)
    return head + raw


def said(client, *pieces, closes=False):
    """All that the server says to these bytes until it closes; closes: our half is closed after them."""
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as raw:
        heard = b""
        try:
            for piece in pieces:
                raw.sendall(piece)
            if closes:
                raw.shutdown(socket.SHUT_WR)
            while piece := raw.recv(65536):
                heard += piece
        except OSError as error:  # it closed while we spoke
            if isinstance(error, TimeoutError):
                raise
        return heard


def statuses(heard):
    return [int(part[:3]) for part in heard.split(b"HTTP/1.1 ")[1:]]


def test_http_1_0_has_no_chunks_and_ends(served):
    heard = said(served[1], ask(version=b"1.0"))
    assert json.loads(heard.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == TEXT
    head, _, events = said(served[1], ask(version=b"1.0", stream=True)).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    pieces = [json.loads(event[6:]) for event in events.decode().split("\n\n") if event.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == TEXT
    assert events.endswith(b"data: [DONE]\n\n")


def test_pipelined_requests_are_answered_in_turn(served):
    last = ask(headers=b"Connection: close\r\n", max_tokens=2)
    heard = said(served[1], ask(max_tokens=3) + ask(stream=True) + last)
    assert statuses(heard) == [200, 200, 200]
    places = [heard.index(f'"text":"{ANSWER[:3]}"'.encode()), heard.index(b"[DONE]"), heard.rindex(b'"text":"th"')]
    assert places == sorted(places)


def test_an_expectation_and_a_body_in_chunks(served):
    raw = json.dumps(P).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    chunks = b"".join(b"1\r\n" + raw[i : i + 1] + b"\r\n" for i in range(len(raw))) + b"0\r\n\r\n"
    heard = said(served[1], head + b"Expect: 100-continue\r\nConnection: close\r\n\r\n", chunks)
    assert statuses(heard) == [100, 200]
    assert TEXT.encode() in heard


@pytest.mark.parametrize(
    "bytes_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),  # TLS to a plain port
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n\r\n\r\n\r\n\x00\x00",
        b"GET /health\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n{}  ",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX Y: z\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 10**6 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(50_000)) + b"\r\n",
    ],
    ids=range(14),
)
def test_what_is_no_request_is_refused(served, bytes_):
    heard = said(served[1], bytes_, closes=True)
    assert all(400 <= status < 500 for status in statuses(heard)), heard[:300]


@pytest.mark.parametrize(
    ("bytes_", "status"),
    [
        (b"GET /health HTTP/9.9\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
        (b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
        (b"TRACE / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
        (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"BREW /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
        (b"GET /%00%ff%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"GET http://elsewhere/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade, close\r\nUpgrade: h2c\r\n\r\n", 200),
        (ask(headers=b"Connection: close\r\nAuthorization: \xff\xfe\r\nX-Request-Id: a b\r\n"), 200),
        (ask(headers=b"Connection: close\r\nContent-Type: text/x-odd; charset=utf-7\r\n"), 200),
    ],
    ids=range(10),
)
def test_what_is_rare_is_answered(served, bytes_, status):
    assert statuses(said(served[1], bytes_)) == [status]


def test_a_websocket_is_refused(served):
    """Which status it is depends on whether a WebSocket library is there; that none is opened does not."""
    key = b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    heard = said(
        served[1], b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n" + key + b"\r\n", closes=True
    )
    assert 101 not in statuses(heard)


@pytest.mark.parametrize("streamed", [False, True])
def test_who_closes_its_half_has_left(served, streamed):
    engine, client = served
    engine.hold, before = True, len(engine.aborted)
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as raw:
        raw.sendall(ask(stream=streamed))
        wait_for(lambda: engine.running)
        raw.shutdown(socket.SHUT_WR)
        wait_for(lambda: len(engine.aborted) > before)
    assert not engine.running
    engine.hold = False
    said(client, ask(stream=streamed), closes=True)  # before its answer begins


@pytest.mark.parametrize("more", [b"\r\n", ask(), ask()[:30], b"\x00"], ids=range(4))
def test_who_sends_more_than_a_request_is_seen_to_leave(served, more):
    engine, client = served
    engine.hold, before = True, len(engine.aborted)
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as raw:
        raw.sendall(ask())
        wait_for(lambda: engine.running)
        raw.sendall(more)
        client.get("/health")  # by now it has read that
    wait_for(lambda: len(engine.aborted) > before)


def test_a_flood_of_pipelined_requests_is_not_taken_in(served):
    """What lies beyond a few is left in the sockets, whose buffers end."""
    engine, client = served
    engine.hold = True
    with socket.create_connection(("127.0.0.1", client.port), timeout=0.5) as raw, pytest.raises(TimeoutError):
        raw.sendall(ask() * 500_000)


def test_who_never_reads_keeps_nobody_waiting(served):
    client = served[1]
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.connect(("127.0.0.1", client.port))
        deaf.sendall(b"".join(ask(stream=True, n=32, logprobs=5) for _ in range(8)))
        for _ in range(5):
            assert client.post(COMPLETIONS, P).json["choices"][0]["text"] == TEXT


def test_a_client_that_is_killed_is_forgotten(served):
    """kill -9 in the middle of its stream."""
    engine, client = served
    engine.hold = True
    before = len(engine.aborted)
    program = (
        "import socket, sys, time\n"
        f"raw = socket.create_connection(('127.0.0.1', {client.port}))\n"
        f"raw.sendall({ask(stream=True)!r})\n"
        "print(len(raw.recv(100)), flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert int(process.stdout.readline()) > 0
        assert len(engine.running) == 1
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_for(lambda: not engine.running)
        assert len(engine.aborted) == before + 1
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def odd_bodies():
    """(path, body as bytes, the field that a refusal names, None where it may also be answered)."""
    for number in (b"NaN", b"-Infinity", b"1e400", b"-1e400", b"1" * 5000):
        for field in (b"temperature", b"top_p", b"frequency_penalty", b"seed", b"priority", b"n"):
            param = field.decode() if b"e" in number else "JSON"
            yield COMPLETIONS, b'{"prompt": "a", "%s": %s}' % (field, number), param
        yield COMPLETIONS, b'{"prompt": [%s]}' % number, "prompt" if b"e" in number else "JSON"
        yield "/detokenize", b'{"tokens": [%s]}' % number, "tokens" if b"e" in number else "JSON"
    yield COMPLETIONS, b'{"prompt": "a", "max_tokens": 3, "max_tokens": 4}', "JSON"
    yield CHAT, b'{"messages": [{"role": "user", "role": "system", "content": "a"}]}', "JSON"
    keys = b",".join(b'"%d":0' % index for index in range(80_000))
    yield COMPLETIONS, b'{"prompt": "a", "logit_bias": {%s,"0":1}}' % keys, "JSON"
    yield COMPLETIONS, json.dumps(P | {"x" * 900_000: 1}).encode(), "x" * 100
    yield "/detokenize", json.dumps({"tokens": [""] * 200_000}).encode(), "tokens"
    yield CHAT, json.dumps({"messages": [1] * 200_000}).encode(), "messages"
    yield CHAT, json.dumps({"messages": [{"role": "user", "content": [1] * 200_000}]}).encode(), "messages"
    yield COMPLETIONS, json.dumps(P | {"stop_token_ids": [1] * 200_000}).encode(), None
    many = [f"{index:05d}" for index in range(60_000)]
    for param in ("stop", "bad_words"):
        yield COMPLETIONS, json.dumps(P | {param: many}).encode(), param
        yield COMPLETIONS, json.dumps(P | {param: ["a" * 500_000]}).encode(), param
        yield COMPLETIONS, json.dumps(P | {param: [1] * 100_000}).encode(), param
    yield COMPLETIONS, json.dumps(P | {"prompt": ["a"] * 100_000}).encode(), "prompt"
    yield COMPLETIONS, json.dumps(P | {"n": 16384}).encode(), "n"
    yield COMPLETIONS, json.dumps(P | {"n": 200, "prompt": ["a", "b"]}).encode(), "n"
    yield COMPLETIONS, json.dumps(P | {"n": 2, "best_of": 3}).encode(), "best_of"
    hi = {"messages": [{"role": "user", "content": "hi"}]}
    for depth in (50, 400, 900):
        schema = {"type": "object", "properties": deep(dict, depth)}
        tool = {"type": "function", "function": {"name": "a", "parameters": schema}}
        for more in ({"tool_choice": "auto"}, {"tool_choice": "required"}, {"stream": True}):
            yield CHAT, json.dumps(hi | {"tools": [tool]} | more).encode(), None
        yield CHAT, json.dumps(hi | {"chat_template_kwargs": {"x": deep(list, depth)}}).encode(), None
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        yield CHAT, json.dumps(hi | {"response_format": form}).encode(), None
        yield COMPLETIONS, json.dumps(P | {"structured_outputs": {"json": schema}}).encode(), None
        call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": json.dumps(deep(dict, depth))}}
        turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x", "tool_call_id": "1"}]
        yield CHAT, json.dumps({"messages": turns}).encode(), None
    for text in ("\x00", "\ud83d", "\u202e\u2066", "e\u0301" * 9, "\U0010ffff", "\r\n\r\ndata: [DONE]\n\n"):
        for body in ({"prompt": text}, {"prompt": "a", "stop": text}, {"prompt": "a", "user": text, "stream": True}):
            yield COMPLETIONS, json.dumps(P | body).encode(), None
        yield CHAT, json.dumps({"messages": [{"role": "user", "content": text, "name": text}]}).encode(), None
        yield COMPLETIONS, json.dumps(P | {"model": text}).encode(), "model"


def test_odd_bodies_are_answered_or_refused(served):
    for path, raw, param in odd_bodies():
        response = served[1].post(path, raw)
        assert response.status == 200 or 400 <= response.status < 500, (path, raw[:200], response.text[:500])
        assert len(response.text) < 5000, (path, raw[:200], response.text[:300])
        if param == "JSON":
            assert response.json["error"]["message"].startswith("the body must be JSON"), (raw[:200], response.text)
        elif param is not None:
            assert response.json["error"]["param"] == param, (raw[:200], response.text)
