"""Host. Structured output over HTTP with the real engine and a tiny model: valid texts, streams, and refusals."""

import json
import re

import pytest

from jaxspec.config.engine import EngineConfig
from jaxspec.engine import build
from jaxspec.engine.async_engine import AsyncEngine
from tests.lossless.engines import full_sizes_alone
from tests.oracle.automata import NESTED, add_byte_level_tokenizer
from tests.oracle.folders import write_llama
from tests.serve.fake import serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = NESTED.constraint["json"]
ASKED = {"prompt": [3, 9, 3, 9], "max_tokens": 30, "temperature": 0}
JSON = {"type": "json_schema", "json_schema": {"name": "nested", "schema": SCHEMA, "strict": True}}
BAD_SCHEMA = {"name": "x", "schema": {"type": "x"}}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "model"
    add_byte_level_tokenizer(write_llama(folder, seed=4, vocab_size=32, eos_token_id=[16, 30]))
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        block_size=4,
        compilation_cache_dir=None,
        gpu_memory_utilization=0.2,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
    )
    engine = AsyncEngine(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_buckets", full_sizes_alone)
        engine.start().wait_until_ready()
    with serving(engine) as client:
        yield client
    engine.shutdown()


def test_an_answer_is_json_to_the_schema_streamed_or_not(client):
    whole = client.post(COMPLETIONS, ASKED | {"response_format": JSON}).json["choices"][0]
    assert whole["finish_reason"] == "stop"
    assert json.loads(whole["text"]) in ({"a": 0}, {"a": {"b": 0}})
    chunks = client.stream(COMPLETIONS, ASKED | {"response_format": JSON})
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == whole["text"]
    for asked in ({"guided_json": SCHEMA}, {"structured_outputs": {"json": json.dumps(SCHEMA)}}):
        assert client.post(COMPLETIONS, ASKED | asked).json["choices"][0]["text"] == whole["text"]
    free = client.post(COMPLETIONS, ASKED).json["choices"][0]["text"]
    assert free != whole["text"]
    chat = {"messages": [{"role": "user", "content": "abc"}], "temperature": 1.5, "seed": 4, "n": 2}
    chosen = client.post(CHAT, chat | {"guided_choice": ["abc", "bad"]}).json["choices"]
    assert {choice["message"]["content"] for choice in chosen} <= {"abc", "bad"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": JSON | {"json_schema": BAD_SCHEMA}}, "response_format", "Invalid type"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_regex": "a("}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "unknown name"),
        ({"structured_outputs": {"choice": ["ZZ"]}}, "structured_outputs", "no token at its beginning"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_a_400_with_the_reason(client, fields, param, says, stream):
    answer = client.post(COMPLETIONS, ASKED | fields | {"stream": stream})
    assert answer.status == 400
    assert answer.json["error"]["param"] == param
    assert says in answer.json["error"]["message"]


def test_parameters_that_leave_no_token_are_an_error_and_the_server_lives_on(client):
    asked = ASKED | {"guided_choice": ["ab"], "allowed_token_ids": [0]}
    answer = client.post(COMPLETIONS, asked)
    assert answer.status == 400
    assert "left no token" in answer.json["error"]["message"]
    assert client.post(COMPLETIONS, ASKED | {"guided_regex": "abc"}).json["choices"][0]["text"] == "abc"
    (compiles,) = re.findall(r"^jaxspec:compiles_after_ready\{.*\} (.*)$", client.get("/metrics").text, re.MULTILINE)
    assert float(compiles) == 0
