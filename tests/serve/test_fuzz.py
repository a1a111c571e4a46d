"""Host. Thousands of malformed bodies: each is a 4xx that names what is wrong; a stream beside them never notices."""

import http.client
import json
import random
import threading
import time

import pytest

from jaxspec.config.server import ServerConfig
from jaxspec.serve.protocol import SAMPLING_FIELDS, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.serve.fake import ANSWER, FakeEngine, serving

ROUTES = {
    "/v1/completions": (CompletionRequest, {"prompt": "hi", "max_tokens": 3}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
RAW = [
    b"", b"{", b"null", b"[]", b"5", b"\xff\xfe", b"{'prompt': 'hi'}", b'{"prompt": "hi",}', b"[" * 200_000,
    b'{"prompt":' * 50_000, b'{"prompt": "hi", "temperature": NaN}', b'{"prompt": "hi", "top_p": Infinity}',
    b'{"prompt": "hi", "seed": -Infinity}', b'{"prompt": "hi", "max_tokens": ' + b"9" * 6000 + b"}",
    b'{"prompt": "\\ud800"}', b'{"prompt": "hi", "max_tokens": 1e400}', b'{"prompt": "hi"} {"prompt": "hi"}',
]  # fmt: skip


def deep(kind, depth):
    value = kind()
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


def nonsense(random_):
    """A value that hardly any field takes."""
    return random_.choice([
        lambda: random_.choice([-1, -(10**30), 10**30, 1.5e308, -0.5, 2**63, 5]),
        lambda: random_.choice(["", "x" * 5000, "\ud800", "\x00", "null", "0x10", "\u202e", "9" * 400]),
        lambda: random_.choice([True, False, [], {}, [None], [[]], {"": None}, {"\ud800": 1}]),
        lambda: deep(random_.choice([list, dict]), random_.choice([3, 50, 900])),
        lambda: [random_.choice([1, "a", None, -1, 10**30, {}]) for _ in range(random_.randrange(1, 6))],
    ])()  # fmt: skip


def malformed(random_):
    """(path, body as bytes, the field that was touched, or None)."""
    path = random_.choice(list(ROUTES))
    kind, good = ROUTES[path]
    choice = random_.random()
    if choice < 0.1:
        return path, random_.choice(RAW), None
    fields = [name for name in kind.model_fields if name != "sampling"]
    if path.startswith("/v1"):
        fields += SAMPLING_FIELDS
    field = (
        random_.choice(fields) if choice < 0.9 else random_.choice(["", "promt", "temprature", "\ud800", "x" * 3000])
    )
    return path, json.dumps(good | {field: nonsense(random_)}).encode(), field


def bombard(num_bodies, seed):
    random_ = random.Random(seed)
    engine = FakeEngine(block=1)
    statuses: dict[int, int] = {}
    named: list[bool] = []  # whether a refusal names the field that is wrong, and not one that it does not go with
    with serving(engine, ServerConfig(max_body_bytes=2**20)) as client:
        engine.hold = True
        streamed: list = []
        streaming = threading.Thread(
            target=lambda: streamed.append(client.stream("/v1/completions", {"prompt": "stay", "max_tokens": 40}))
        )
        streaming.start()
        while not engine.running:
            time.sleep(0.001)
        (held,) = engine.running
        engine.only_holds = held
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=30)
        for _ in range(num_bodies):
            path, body, field = malformed(random_)
            connection.request("POST", path, body)
            response = connection.getresponse()
            said = response.read()
            answer = json.loads(said) if "json" in response.headers["content-type"] else {}
            statuses[response.status] = statuses.get(response.status, 0) + 1
            assert response.status == 200 or 400 <= response.status < 500, (path, body[:300], answer)
            if response.status == 400:
                assert answer["error"]["message"]
                param, is_json = answer["error"]["param"], "must be JSON" not in answer["error"]["message"]
                assert param is not None or field is None or not is_json, (path, body[:300], answer)
                if field is not None and is_json:
                    named.append(param == field[:100])
        connection.close()
        huge = http.client.HTTPConnection("127.0.0.1", client.port, timeout=30)
        huge.request("POST", "/v1/completions", json.dumps({"prompt": "x" * 10_000_000}).encode())
        assert huge.getresponse().status == 413
        huge.close()
        engine.hold = False
        streaming.join(20)
        (chunks,) = streamed
        assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == ANSWER[:40]
        assert client.get("/health").status == 200
        assert engine.running == set()
    assert sum(named) > 0.95 * len(named)
    return statuses


def test_a_few_hundred_bodies():
    statuses = bombard(300, seed=1)
    assert statuses[400] > 200


@pytest.mark.heavy
def test_five_thousand_bodies():
    statuses = bombard(5000, seed=2)
    assert statuses[400] > 3000
