"""Host. The routes over the real engine with a tiny model: streams, usage, leavers, metrics, no late compile."""

import importlib.util
import json
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.async_engine import AsyncEngine
from tests.serve.fake import CHAT_TEMPLATE, LETTERS, letter_tokenizer, serving

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "goldens" / "tiny" / "llama"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_SPEC_TOKENS = 3
# A letter for each of the model's 128 ids, so that all it says can be read.
ALL_LETTERS = LETTERS + "".join(map(chr, range(0x100, 0x100 + 128 - len(LETTERS))))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny Llama with a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(TINY / name, folder / name)
    letter_tokenizer(ALL_LETTERS).backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def engine(model):
    return AsyncEngine(
        EngineConfig(
            model=str(model),
            served_model_name="tiny",
            dtype="float32",
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            block_size=8,
            compilation_cache_dir=None,
            gpu_memory_utilization=0.2,
            speculative_config={
                "method": "ngram",
                "num_speculative_tokens": NUM_SPEC_TOKENS,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 3,
            },
        ),
        startup_probe_tokens=4,
    )


@pytest.fixture(scope="module")
def client(engine):
    with serving(engine) as client:
        assert client.get("/health").status == 503
        engine.start()
        deadline = time.monotonic() + 300
        while client.get("/health").status != 200:
            assert engine.is_healthy
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield client
        engine.shutdown()
        assert client.get("/health").status == 503
        assert client.post(COMPLETIONS, {"prompt": "hi"}).status == 503


def scrape(client):
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {s.name: s.value for f in families for s in f.samples if not s.name.endswith(("_created", "_bucket"))}


def greedy(prompt="abcabcabc", **more):
    return {"prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True} | more


def test_the_same_text_streamed_or_not_alone_or_among_others(client):
    alone = client.post(COMPLETIONS, greedy()).json
    assert alone["usage"]["completion_tokens"] == 24
    chunks = client.stream(COMPLETIONS, greedy(stream_options={"include_usage": True}))
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == alone["choices"][0]["text"]
    assert chunks[-1]["usage"] == alone["usage"]
    prompts = ["abcabcabc", "hello", "xyz" * 12, "q"]
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(lambda p: client.post(COMPLETIONS, greedy(p)).json["choices"][0]["text"], prompts * 2))
    assert crowd[0] == crowd[4] == alone["choices"][0]["text"]
    assert crowd[:4] == crowd[4:]
    asked_before = client.post(COMPLETIONS, greedy("xyz" * 12)).json["usage"]
    assert asked_before["prompt_tokens_details"]["cached_tokens"] > 0
    together = client.post(COMPLETIONS, greedy(prompts)).json
    assert [choice["text"] for choice in together["choices"]] == crowd[:4]


def test_a_seed_gives_the_same_text_and_choices_differ(client):
    asked = greedy(temperature=1.5, seed=11, n=3)
    first, second = (client.post(COMPLETIONS, asked).json for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) == 3
    unseeded = {client.post(COMPLETIONS, greedy(temperature=1.5)).json["choices"][0]["text"] for _ in range(3)}
    assert len(unseeded) == 3


def test_a_stop_string_cuts_text_and_usage_alike(client):
    text = client.post(COMPLETIONS, greedy()).json["choices"][0]["text"]
    assert len(text) == 24
    stop = text[5:7]
    body = client.post(COMPLETIONS, greedy(stop=stop)).json
    (choice,) = body["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    streamed = client.stream(COMPLETIONS, greedy(stop=stop))
    assert "".join(c["text"] for chunk in streamed for c in chunk["choices"]) == choice["text"]


def test_a_chat_answers(client):
    body = client.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}).json
    assert body["usage"]["prompt_tokens"] == len("user:hi\nassistant:")
    assert 1 <= body["usage"]["completion_tokens"] <= 5


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [5, 128]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"prompt": "a" * 128}, "prompt"),
        ({"prompt": "a", "max_tokens": 128}, "max_tokens"),
        ({"prompt": "a", "stop_token_ids": [128]}, "stop_token_ids"),
        ({"prompt": "a", "stop_token_ids": list(range(100))}, "stop_token_ids"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "a", "logit_bias": {"128": 1}}, "logit_bias"),
        ({"prompt": "a", "allowed_token_ids": [1, 128]}, "allowed_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "allowed_token_ids"),
        ({"prompt": "a", "extra_args": {"x": 1}}, "extra_args"),
    ],
)
def test_what_the_engine_refuses_is_a_400_and_it_lives_on(client, body, param):
    for asked in (body, body | {"stream": True}):
        response = client.post(COMPLETIONS, asked)
        assert response.status == 400, response.text
        assert response.json["error"]["param"] == param
    assert client.post(COMPLETIONS, greedy(max_tokens=1)).status == 200


def test_degenerate_sizes(client):
    assert client.post(COMPLETIONS, greedy("a", max_tokens=1)).json["usage"]["completion_tokens"] == 1
    longest = client.post(COMPLETIONS, greedy("a" * 127, max_tokens=1)).json
    assert longest["choices"][0]["finish_reason"] == "length"
    to_the_end = client.post(COMPLETIONS, greedy("a" * 100, max_tokens=28)).json
    assert to_the_end["usage"]["total_tokens"] == 128


def leave_after_the_first_chunk(client):
    raw = json.dumps(greedy("ab", max_tokens=120, stream=True, n=4)).encode()
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        assert b"200 OK" in connection.recv(200)


def test_who_leaves_is_written_for_no_longer(client):
    before = scrape(client)
    leave_after_the_first_chunk(client)
    # Four rows are all there are: this one starts only when the leaver's rows are free.
    assert client.post(COMPLETIONS, greedy()).json["usage"]["completion_tokens"] == 24
    now = scrape(client)
    assert now["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] < 4 * 120
    assert now["vllm:request_success_total"] - before["vllm:request_success_total"] >= 1


def test_who_leaves_is_gone_from_the_gauges(client):
    leave_after_the_first_chunk(client)
    deadline = time.monotonic() + 2
    while (now := scrape(client))["vllm:num_requests_running"] or now["vllm:kv_cache_usage_perc"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_scrape_agrees_with_the_responses_and_never_falls(client):
    before = scrape(client)
    totals = dict.fromkeys(("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "num_output_tokens"), 0)
    for asked in (greedy(), greedy(["abab", "q"], n=2), greedy(temperature=0.7, seed=3), greedy(max_tokens=1)):
        body = client.post(COMPLETIONS, asked).json
        figures = body["metrics"]["speculative_decoding"]
        assert figures["num_accepted_draft_tokens"] <= figures["num_draft_tokens"]
        assert figures["num_output_tokens"] == body["usage"]["completion_tokens"]
        totals = {key: totals[key] + figures[key] for key in totals}
    after = scrape(client)
    assert all(after[name] >= before[name] for name in before if name.endswith(("_total", "_count")))
    names = {
        "num_spec_steps": "vllm:spec_decode_num_drafts_total",
        "num_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
        "num_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens_total",
        "num_output_tokens": "vllm:generation_tokens_total",
    }
    assert {key: after[name] - before[name] for key, name in names.items()} == totals
    assert totals["num_draft_tokens"] > 0


def test_a_request_s_times_add_up(client):
    before = scrape(client)
    prompt = "never asked before, and never again"
    body = client.post(COMPLETIONS, greedy(prompt, speculative={"enabled": False})).json
    after = scrape(client)
    grew = {name.removeprefix("vllm:"): after[name] - before[name] for name in before}
    queue, prefill, decode = (grew[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode"))
    assert min(queue, prefill, decode) > 0
    assert queue + prefill + decode == pytest.approx(grew["e2e_request_latency_seconds_sum"])
    assert prefill + decode == pytest.approx(grew["request_inference_time_seconds_sum"])
    assert queue + prefill == pytest.approx(grew["time_to_first_token_seconds_sum"])
    # A token a round, the first after no other; all but the prompt's last token are prefilled, if not cached.
    assert grew["inter_token_latency_seconds_count"] == 23
    assert 0 < grew["inter_token_latency_seconds_sum"] <= decode
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert grew["iteration_tokens_total_sum"] == len(prompt) - 1 - cached + 24
    assert (grew["request_params_n_sum"], grew["request_params_max_tokens_sum"]) == (1, 24)


def test_a_prompt_is_scored_as_lm_eval_asks(client):
    """Its context's and continuation's log-probabilities: of one text in two cuts, the same."""
    asked = {"prompt": "abcab", "echo": True, "logprobs": 1, "temperature": 0, "seed": 1}
    scored = client.post(COMPLETIONS, asked | {"max_tokens": 0}).json["choices"][0]
    with_answer = client.post(COMPLETIONS, asked | {"max_tokens": 1}).json["choices"][0]
    assert scored["text"] == "abcab"
    assert with_answer["text"].startswith("abcab")
    first, *rest = scored["logprobs"]["token_logprobs"]
    assert first is None
    assert all(logprob < 0 for logprob in rest)
    assert with_answer["logprobs"]["token_logprobs"][:5] == scored["logprobs"]["token_logprobs"]
    # What the model itself says next is its likeliest, and an echo of it says so too.
    continued = client.post(COMPLETIONS, asked | {"prompt": with_answer["text"], "max_tokens": 0}).json["choices"][0]
    chosen, likeliest = continued["logprobs"]["token_logprobs"][5], continued["logprobs"]["top_logprobs"][5]
    assert chosen == max(likeliest.values())
    assert chosen == pytest.approx(with_answer["logprobs"]["token_logprobs"][5], abs=1e-4)


def test_token_origins_add_up_to_the_figures(client):
    body = client.post(COMPLETIONS, greedy("abababab", max_tokens=40, return_token_origins=True)).json
    (choice,), figures = body["choices"], body["metrics"]["speculative_decoding"]
    counts = {origin: [t["origin"] for t in choice["tokens"]].count(origin) for origin in ("accepted", "plain")}
    assert "".join(token["text"] for token in choice["tokens"]) == choice["text"]
    assert len(choice["tokens"]) == 40
    assert counts["accepted"] > 0
    cut = sum(i * n for i, n in enumerate(figures["acceptance_histogram"])) - counts["accepted"]
    assert 0 <= cut <= NUM_SPEC_TOKENS, "only what the last round kept beyond the limit has no token"
    plain = greedy("abababab", max_tokens=40, return_token_origins=True, speculative={"enabled": False})
    unspeculated = client.post(COMPLETIONS, plain).json["choices"][0]
    assert {token["origin"] for token in unspeculated["tokens"]} == {"plain"}
    assert unspeculated["text"] == choice["text"]
    report = client.get("/v1/speculation").json
    assert (report["enabled"], report["config"]["method"]) == (True, "ngram")
    assert 0 < report["acceptance"]["acceptance_per_position"][0] <= 1


class Gate:
    """Lets a core step only as often as it is told to."""

    def __init__(self, core, monkeypatch):
        self._step, self._tickets, self._standing = core.step, threading.Semaphore(0), threading.Event()
        monkeypatch.setattr(core, "step", self._stepped)

    def _stepped(self):
        self._standing.set()
        assert self._tickets.acquire(timeout=60)
        return self._step()

    def wait(self):
        """Until the engine stands before a step."""
        assert self._standing.wait(60)

    def let(self, steps):
        for _ in range(steps):
            self.wait()
            self._standing.clear()
            self._tickets.release()

    def open(self):
        self._tickets.release(10**6)


def test_who_leaves_has_no_row_in_the_next_round_but_one(engine, client, monkeypatch):
    """Counted in rounds, of which a step is one on this platform: the one under way, and no other."""
    core = engine._core
    assert core.parts.programs.shapes.max_rounds == 1
    gate = Gate(core, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        try:
            staying = pool.submit(client.post, COMPLETIONS, greedy(max_tokens=60, speculative={"enabled": False}))
            gate.wait()
            raw = json.dumps(greedy("ab", max_tokens=100, stream=True, n=3, speculative={"enabled": False})).encode()
            with socket.create_connection(("127.0.0.1", client.port), timeout=30) as connection:
                head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
                connection.sendall(head.encode() + raw)
                while engine._commands.empty():
                    time.sleep(0.001)
                gate.let(8)
                assert b"200 OK" in connection.recv(200)
                gate.wait()
                assert core.scheduler.num_running == 4
                pages = core.scheduler.num_used
            while engine._commands.empty():  # the server sees that it left; the engine stands before a round
                time.sleep(0.001)
            gate.let(1)
            gate.wait()
            assert core.scheduler.num_running == 1
            assert 0 < core.scheduler.num_used < pages
        finally:
            gate.open()
        assert staying.result().json["usage"]["completion_tokens"] == 60
    assert core.scheduler.num_used == core.scheduler.num_running == 0


def test_200_streams_that_leave_at_random_give_everything_back(client):
    """Rows and pages return, counters never fall, no draft is accepted that was not made, who stays is answered."""
    spec = importlib.util.spec_from_file_location("abuse_server", ROOT / "scripts" / "abuse_server.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    report = script.abuse(client.port, greedy("ab", max_tokens=40), 200, kills=4, seed=3)
    assert report["faults"] == []
    assert min(report["streams"].values()) >= 4
    assert len(report["streams"]) == 5
    assert report["tokens_written"] < 0.9 * report["tokens_if_nobody_had_left"]


def test_nothing_was_compiled_after_ready(client):
    """T18: this runs after all of the above, and says so if it does not."""
    seen = scrape(client)
    assert seen["vllm:generation_tokens_total"] > 0
    assert seen["jaxspec:compiles_after_ready"] == 0
