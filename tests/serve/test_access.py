"""Host. Who may ask, what is logged and told of it, and what ends a request or the server's good health."""

import contextlib
import json
import logging
import socket
import time

import pytest

from jaxspec.config.server import ServerConfig
from jaxspec.errors import CapacityError, ConfigError, QueueFullError
from jaxspec.serve import profiling
from jaxspec.serve.access import JsonFormatter, check_key, keys_of
from jaxspec.serve.app import create_app
from jaxspec.serve.errors import HttpError
from jaxspec.serve.server import bind
from tests.serve import fake
from tests.serve.fake import ANSWER, FakeEngine, serving

COMPLETIONS = "/v1/completions"
P = {"prompt": "hi"}


@pytest.fixture(scope="module")
def served():
    engine = FakeEngine()
    with serving(engine, ServerConfig(retry_after_s=7)) as client:
        yield engine, client


def test_several_keys_from_the_config_and_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nfile-key\n\n  spaced  \n")
    config = ServerConfig(api_key=["one", "two"], api_key_file=str(file))
    assert keys_of(config) == (b"one", b"two", b"file-key", b"spaced")
    with serving(FakeEngine(), config) as client:
        for key in ("one", "two", "file-key", "spaced"):
            assert client.post(COMPLETIONS, P, headers={"Authorization": f"Bearer {key}"}).status == 200
        for header in ("", "Bearer", "Bearer on", "Bearer one two", "Basic one", "one", "Bearer \xe9"):
            response = client.post(COMPLETIONS, P, headers={"Authorization": header})
            assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
            assert response.json["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/v1/speculation"):
            assert client.get(path).status == 401
        for path in ("/", "/docs", "/openapi.json", "/health", "/metrics", "/version"):
            assert client.get(path).status == 200
        assert client.get("/openapi.json").json["security"] == [{"key": []}]


def test_a_right_key_is_found_among_wrong_ones_and_no_keys_let_all_in():
    check_key((), "")
    check_key((b"a", b"b", b"c"), "bearer b")
    with pytest.raises(HttpError):
        check_key((b"a",), "Bearer ")


def test_keys_are_never_shown(tmp_path, caplog, capsys):
    (tmp_path / "empty").write_text("# none\n")
    for config in ({"api_key_file": str(tmp_path / "empty")}, {"api_key_file": str(tmp_path / "missing")}):
        with pytest.raises(ConfigError, match="api_key_file"):
            create_app(FakeEngine(), ServerConfig(**config))
    assert "sesame" not in repr(ServerConfig(api_key="sesame"))
    with pytest.raises(ConfigError) as caught:
        ServerConfig(api_key=[1234567, "sesame"])
    assert "api_key" in str(caught.value)
    assert "1234567" not in str(caught.value)
    caplog.set_level(logging.DEBUG)
    with serving(FakeEngine(), ServerConfig(api_key="sesame")) as client:
        client.post(COMPLETIONS, P, headers={"Authorization": "Bearer sesame"})
        client.post(COMPLETIONS, P, headers={"Authorization": "Bearer almost-sesame"})
    assert COMPLETIONS in caplog.text
    assert "sesame" not in caplog.text + "".join(capsys.readouterr())


def logged(caplog, count):
    """What the first so many requests left in the log, which is written as they end."""
    deadline = time.monotonic() + 5
    while len(found := [record.facts for record in caplog.records if record.name == "jaxspec.serve.access"]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def test_a_request_s_id_comes_back_and_into_the_log(served, caplog):
    _, client = served
    caplog.set_level(logging.INFO, "jaxspec.serve.access")
    assert client.post(COMPLETIONS, P, headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = client.post(COMPLETIONS, {"prompt": 5}, headers={"X-Request-Id": "a b\x7f"}).headers["x-request-id"]
    assert len(made) == 32
    good, bad = logged(caplog, 2)
    assert (good["request_id"], good["status"], good["path"]) == ("abc-1", 200, COMPLETIONS)
    assert (good["prompt_tokens"], good["completion_tokens"]) == (2, 16)
    assert (bad["request_id"], bad["status"]) == (made, 400)
    line = json.loads(JsonFormatter().format(caplog.records[-1]))
    assert (line["status"], line["level"]) == (400, "info")
    client.get("/health")  # what machines ask all the time is no news
    client.get("/a%0Ab")
    assert [facts["path"] for facts in logged(caplog, 3)] == [COMPLETIONS, COMPLETIONS, "/a\nb"]
    assert "\n" not in caplog.records[-1].getMessage()


def test_pages_elsewhere_may_ask_only_where_that_is_wanted(served):
    headers = {"Origin": "http://elsewhere.test", "Access-Control-Request-Method": "POST"}
    assert served[1].request("OPTIONS", COMPLETIONS, headers=headers).status == 405
    assert "access-control-allow-origin" not in served[1].post(COMPLETIONS, P, headers=headers).headers
    with serving(FakeEngine(), ServerConfig(allowed_origins=["http://elsewhere.test"])) as client:
        asked = client.request("OPTIONS", COMPLETIONS, headers=headers)
        assert (asked.status, asked.headers["access-control-allow-origin"]) == (200, "http://elsewhere.test")
        other = client.post(COMPLETIONS, P, headers={"Origin": "http://third.test"})
        assert "access-control-allow-origin" not in other.headers


def test_a_full_queue_is_a_429_that_says_when_to_come_again(served):
    engine, client = served
    engine.fail_after_steps = 0
    try:
        engine.failure = QueueFullError("3 answers wait, and no more may; come again")
        for body in (P, P | {"stream": True}):
            response = client.post(COMPLETIONS, body)
            assert (response.status, response.headers["retry-after"]) == (429, "7")
            assert (response.json["error"]["type"], response.json["error"]["code"]) == (
                "rate_limit_error",
                "queue_full",
            )
        engine.failure = CapacityError("it can never fit")
        response = client.post(COMPLETIONS, P)
        assert (response.status, response.headers["retry-after"]) == (400, None)
    finally:
        engine.fail_after_steps, engine.failure = None, RuntimeError("secret detail")


def test_an_answer_that_takes_too_long_ends_and_frees_its_row():
    engine = FakeEngine()
    engine.hold = True
    with serving(engine, ServerConfig(request_timeout_s=0.2)) as client:
        response = client.post(COMPLETIONS, P)
        assert (response.status, response.json["error"]["code"]) == (504, "timeout")
        assert response.headers["x-should-retry"] == "false"
        *chunks, error = client.stream(COMPLETIONS, P)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == [ANSWER[:3]]
        assert error["error"]["code"] == "timeout"
        assert engine.running == set()
        assert len(engine.aborted) == 2


def test_a_body_that_never_arrives_is_given_up():
    with (
        serving(FakeEngine(), ServerConfig(body_timeout_s=0.2)) as client,
        socket.create_connection(("127.0.0.1", client.port), timeout=10) as raw,
    ):
        raw.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"prompt"')
        assert b" 408 " in raw.recv(1000)
        assert client.post(COMPLETIONS, P).status == 200


def test_who_never_finishes_asking_keeps_nobody_waiting(served):
    """Slow-loris: many connections that say a little and no more."""
    _, client = served
    half = [b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le", b""]
    with contextlib.ExitStack() as open_ones:
        for index in range(60):
            raw = open_ones.enter_context(socket.create_connection(("127.0.0.1", client.port), timeout=10))
            raw.sendall(half[index % len(half)])
        assert client.post(COMPLETIONS, P).json["choices"][0]["text"] == ANSWER[:16]
        assert len(client.stream(COMPLETIONS, P)) == 6


def test_a_head_that_never_arrives_is_given_up():
    """Also that of a connection's second request, and however slowly its lines drip in."""
    with (
        serving(FakeEngine(), ServerConfig(body_timeout_s=0.3)) as client,
        socket.create_connection(("127.0.0.1", client.port), timeout=10) as dripping,
        socket.create_connection(("127.0.0.1", client.port), timeout=10) as silent,
    ):
        raw = json.dumps(P).encode()
        dripping.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        assert b" 200 " in dripping.recv(10_000)
        heard = b""
        dripping.settimeout(0.02)
        deadline = time.monotonic() + 10
        while not heard:
            assert time.monotonic() < deadline
            with contextlib.suppress(TimeoutError):
                dripping.sendall(b"G")
                heard = dripping.recv(1000)
        assert b" 408 " in heard
        assert b" 408 " in silent.recv(1000)
        assert silent.recv(1000) == b""
        assert client.post(COMPLETIONS, P).status == 200


def test_who_takes_nothing_of_an_answer_is_cut(monkeypatch):
    def bind_with_little_room(host, port):
        listening = bind(host, port)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # also that of the connections it takes
        return listening

    monkeypatch.setattr(fake, "bind", bind_with_little_room)
    engine = FakeEngine(block=9)
    engine.hold = True  # its first step is more than the connection holds
    raw = json.dumps(P | {"stream": True, "max_tokens": 44, "n": 200, "logprobs": 5}).encode()
    with serving(engine, ServerConfig(body_timeout_s=0.3)) as client, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.connect(("127.0.0.1", client.port))
        deaf.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        assert deaf.recv(15) == b"HTTP/1.1 200 OK"
        deadline = time.monotonic() + 20
        while not engine.aborted:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert engine.running == set()


@pytest.mark.parametrize("length", [b"1e3", b"-5", b"9" * 30, b"\xb2"])
def test_a_length_that_is_none_is_refused(served, length):
    _, client = served
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + length + b"\r\n\r\n{}")
        assert b" 4" in raw.recv(1000)[:14]
    assert client.post(COMPLETIONS, P).status == 200


def test_health_sees_a_step_that_does_not_end(served):
    engine, client = served
    engine.step_seconds = 1000.0
    try:
        response = client.get("/health")
        assert (response.status, response.json["status"]) == (503, "stuck")
    finally:
        engine.step_seconds = 0.0
    assert client.get("/health").status == 200


def test_a_large_body_is_read_off_the_event_loop(monkeypatch):
    """While one is read, others are answered."""
    from jaxspec.serve import app

    inner = app.parse

    def slow(kind, body):
        if len(body.get("user", "")) > app.LARGE_BODY_BYTES:
            time.sleep(0.5)
        return inner(kind, body)

    monkeypatch.setattr(app, "parse", slow)
    with serving(FakeEngine()) as client, socket.create_connection(("127.0.0.1", client.port), timeout=10) as raw:
        body = json.dumps(P | {"user": "x" * (app.LARGE_BODY_BYTES + 1)}).encode()
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        raw.settimeout(0.0)
        assert client.get("/health").status == 200
        with pytest.raises(BlockingIOError):
            raw.recv(100)
        raw.settimeout(10)
        assert b" 200 " in raw.recv(1000)


def test_profiles_only_where_asked_for(served, monkeypatch, tmp_path):
    assert served[1].post("/start_profile", {}).status == 404
    calls = []
    monkeypatch.setattr(profiling, "_start", lambda folder: calls.append(folder))
    monkeypatch.setattr(profiling, "_stop", lambda: calls.append("stop"))
    with serving(FakeEngine(), ServerConfig(profiler_dir=str(tmp_path))) as client:
        statuses = [client.post(f"/{path}_profile", {}).status for path in ("stop", "start", "start", "stop", "stop")]
    assert statuses == [409, 200, 409, 200, 409]
    assert calls == [str(tmp_path), "stop"]
