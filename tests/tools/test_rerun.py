"""Device. `record` and `jaxspec replay`: what happened happens again, and what comes out otherwise is told."""

import json

import pytest

from jaxspec import ConfigError, Engine, RequestError, SamplingParams
from jaxspec.cli import main
from jaxspec.config.engine import EngineConfig
from jaxspec.engine.journal import FORMAT, Journal, open_journal, params_event, params_of
from tests.oracle.folders import write_llama

SETTINGS = {
    "dtype": "float32", "max_model_len": 48, "max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 4,
    "num_pages": 14, "enable_structured_outputs": False, "gpu_memory_utilization": 0.2, "use_tqdm": False,
    "rounds_per_batch": 2, "async_scheduling": True,
}  # fmt: skip
HEAD = {"event": "engine", "format": FORMAT, "costs": None, "startup_probe_tokens": 0}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(lines, file): requests that share a beginning, press each other out of the pages, are drawn with a seed that
    the engine chose, and one that leaves."""
    folder = tmp_path_factory.mktemp("recorded")
    file = folder / "journal.jsonl"
    model = write_llama(folder / "model", seed=4)
    engine = Engine(
        str(model),
        speculative_config=NGRAM,
        record=str(file),
        compilation_cache_dir=str(folder / "cache"),
        **SETTINGS,
    )
    prompts = [{"prompt_token_ids": [1, 2, 3, 4, 1, 2, 3, *range(number)]} for number in range(9)]
    params = [
        SamplingParams(temperature=number % 2, max_tokens=20, n=1 + number % 3 % 2, ignore_eos=True)
        for number in range(9)
    ]
    engine.core.add_request("leaves", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.core.step()
    engine.core.abort("leaves")
    biased = SamplingParams(temperature=0.5, seed=7, max_tokens=6, logit_bias={3: 2.5}, repetition_penalty=1.2)
    engine.generate([*prompts, {"prompt_token_ids": [9, 8]}], [*params, biased], use_tqdm=False)
    return file.read_text().splitlines(), file


def test_what_is_recorded_comes_out_again(recorded, capsys):
    lines, file = recorded
    events = [json.loads(line) for line in lines]
    steps = [event for event in events if event["event"] == "step"]
    plans = [event["plan"] for event in steps if event["plan"]]
    assert any(plan["preempted"] for plan in plans)
    assert any(num_cached for plan in plans for _, _, num_cached in plan["admitted"])
    assert any("ahead" in event and not event["plan"] for event in steps), "rounds behind rounds"
    assert {event["event"] for event in events} == {"engine", "add", "abort", "step"}
    assert main(["replay", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    num_tokens = sum(len(ids) for event in steps for ids in event["tokens"].values())
    assert (report["num_steps"], report["num_tokens"], report["difference"]) == (len(steps), num_tokens, None)
    assert num_tokens > 200


def test_another_token_is_found_where_it_stands(recorded, tmp_path, capsys):
    """And the line behind it, which a killed process left unfinished, is no matter."""
    lines, _ = recorded
    number, event = [(number, json.loads(line)) for number, line in enumerate(lines, 1) if '"tokens": {"' in line][5]
    ids = next(iter(event["tokens"].values()))
    ids[-1] = (ids[-1] + 1) % 32
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join([*lines[: number - 1], json.dumps(event), lines[number][:9]]))
    assert main(["replay", str(changed), "--json"]) == 1
    difference = json.loads(capsys.readouterr().out.splitlines()[-1])["difference"]
    assert difference["line"] == number
    assert difference["recorded"] == event
    assert difference["found"] == json.loads(lines[number - 1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must begin with an engine"),
        ('{"event": "step"}\n', "must begin with an engine"),
        ("no json\n", "is no journal"),
        ("[1]\n", "must be a JSON object"),
        ('{"event": "engine", "format": "jaxspec-journal-1"}\n', "line 1 is not as `record` writes it"),
        (
            json.dumps(HEAD | {"config": {"model": "m", "modle": 1}}) + "\n",
            "modle",
        ),
    ],
)
def test_what_is_no_journal_is_refused(tmp_path, capsys, text, words):
    file = tmp_path / "journal.jsonl"
    file.write_text(text)
    assert main(["replay", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_no_file(tmp_path, capsys):
    assert main(["replay", str(tmp_path / "nowhere")]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0, stop=["a", "b"], stop_token_ids=[1], bad_words=["x"], logprobs=3, seed=5, n=2),
        SamplingParams(logit_bias={4: -1.0}, allowed_token_ids=[4, 5], speculative={"enabled": False}, min_tokens=2),
        SamplingParams(structured_outputs={"json": {"type": "object"}, "disable_any_whitespace": True}),
    ],
    ids=str,
)
def test_parameters_come_back_as_they_went(params):
    assert params_of(json.loads(json.dumps(params_event(params)))) == params


def test_parameters_of_another_version_are_refused():
    with pytest.raises(RequestError, match="heat"):
        params_of({"heat": 1})


def test_code_is_refused(tmp_path):
    config = EngineConfig(model="m", record=str(tmp_path / "journal"))
    with pytest.raises(ConfigError, match="record cannot hold"):
        open_journal(config, None, has_own_code=True, startup_probe_tokens=0)  # type: ignore[arg-type]
    params = SamplingParams(logits_processors=[lambda token_ids, logits: logits])
    with pytest.raises(RequestError, match="logits_processors are code"):
        Journal(print).check(params)
    Journal().check(params)
