"""Host. The bench of a server: what it counts, by hand; when it sends; and a run against the routes."""

import itertools
import json
import statistics

import pytest

from jaxspec.bench import serve
from jaxspec.bench.latency import Answer, parse_goodput, summarize
from jaxspec.bench.serve import acceptance, arrivals, main, read_bodies
from jaxspec.errors import ConfigError
from tests.serve.fake import ANSWER, NUM_SPEC_TOKENS, FakeEngine, serving

ANSWERS = [
    Answer(sent=0.0, num_prompt_tokens=10, num_output_tokens=5, arrivals=[1.0, 2.0, 5.0]),
    Answer(sent=1.0, num_prompt_tokens=20, num_output_tokens=1, arrivals=[1.5]),
    Answer(sent=2.0, error="HTTP 503"),
]


def test_the_figures_of_three_answers():
    report = summarize(ANSWERS, 10.0, {"ttft": 600.0})
    assert (report["completed"], report["failed"]) == (2, 1)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (30, 6)
    assert report["output_throughput"] == pytest.approx(0.6)
    assert report["total_token_throughput"] == pytest.approx(3.6)
    assert report["mean_ttft_ms"] == pytest.approx(750.0)
    assert report["mean_tpot_ms"] == pytest.approx(1000.0)  # of the first alone: 4 s for the 4 tokens after its first
    assert report["median_itl_ms"] == pytest.approx(2000.0)
    assert report["p99_e2el_ms"] == pytest.approx(500 + 0.99 * 4500)
    assert report["request_goodput"] == pytest.approx(0.1)
    assert "request_goodput" not in summarize(ANSWERS, 10.0, {})
    assert summarize(ANSWERS, 10.0, {"ttft": 2000.0, "e2el": 1000.0})["request_goodput"] == pytest.approx(0.1)


def test_a_load_without_an_answer_has_figures_too():
    report = summarize(ANSWERS[2:], 1.0, {})
    assert (report["completed"], report["mean_ttft_ms"]) == (0, 0.0)


def test_goals():
    assert parse_goodput(["ttft:500", "tpot:50.5"]) == {"ttft": 500.0, "tpot": 50.5}
    for word in ("ttft", "ttft:", "ttft:0", "itl:5", "ttft:x"):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_goodput([word])


def test_arrivals_are_a_process_of_the_rate():
    assert arrivals(3, float("inf"), 1.0, 0) == [0.0] * 3
    times = arrivals(4000, 5.0, 1.0, 7)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)  # exponential
    even = arrivals(4000, 5.0, 100.0, 7)
    assert statistics.stdev(b - a for a, b in itertools.pairwise(even)) == pytest.approx(0.02, rel=0.1)
    assert arrivals(5, 5.0, 1.0, 7) == times[:5]


def test_acceptance_is_what_was_counted_in_between():
    before = {"num_drafts": 1.0, "num_draft_tokens": 4.0, "num_accepted_tokens": 4.0}
    after = {"num_drafts": 5.0, "num_draft_tokens": 12.0, "num_accepted_tokens": 6.0}
    report = acceptance(before, after)
    assert (report["spec_decode_acceptance_rate"], report["spec_decode_acceptance_length"]) == (0.25, 1.5)
    assert acceptance(before, before)["spec_decode_acceptance_length"] == 0.0
    assert acceptance(None, after) == {}


def write_prompts(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_prompts_that_are_none(tmp_path):
    for rows in ([], [{"prompt": "a"}], [{"max_tokens": 3}], [["a"]]):
        with pytest.raises(ConfigError, match="prompt"):
            read_bodies(write_prompts(tmp_path / "p.jsonl", rows))
    with pytest.raises(ConfigError, match="cannot read"):
        read_bodies(tmp_path / "none.jsonl")


def test_a_run_against_the_routes(tmp_path, capsys):
    rows = [
        {"prompt": "abc", "max_tokens": 6},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60},
    ]
    path = write_prompts(tmp_path / "p.jsonl", rows)
    with serving(FakeEngine()) as client:
        words = ["--port", str(client.port), "--prompts", str(path), "--num-prompts", "5", "--request-rate", "200"]
        assert main([*words, "--goodput", "e2el:60000", "--max-concurrency", "2"]) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (report["completed"], report["failed"], report["model_id"]) == (5, 0, "fake")
        assert report["total_output_tokens"] == 3 * 6 + 2 * len(ANSWER)
        assert report["request_goodput"] == pytest.approx(report["request_throughput"])
        assert report["mean_e2el_ms"] >= report["mean_ttft_ms"] > 0
        # Every step of the engine's is three letters, two of which were drafts; the last of an answer has fewer.
        assert report["spec_decode_num_draft_tokens"] == report["spec_decode_num_accepted_tokens"] > 5
        assert 2 < report["spec_decode_acceptance_length"] <= 3 <= NUM_SPEC_TOKENS
        assert main([*words, "--model", "another"]) == 1
        out = capsys.readouterr().out
        assert json.loads(out.splitlines()[-1])["failed"] == 5
        assert "404" in out


def test_without_a_server_or_with_wrong_flags(capsys):
    assert main(["--port", "1"]) == 2
    assert main(["--base-url", "nowhere"]) == 2
    assert main(["--request-rate", "0"]) == 2
    assert main(["--goodput", "x"]) == 2
    assert capsys.readouterr().err.count("jaxspec bench serve: ") == 4
    assert serve.TIMEOUT_S > 60
