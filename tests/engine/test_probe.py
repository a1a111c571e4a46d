"""Host. The probe before an engine is ready: one line, through programs that are there, and no trace of it."""

import logging
from types import SimpleNamespace

import pytest

from jaxspec import SamplingParams
from jaxspec.engine import probe
from jaxspec.metrics.acceptance import AcceptanceStats
from tests.lossless.engines import draft_model, make_engine

K = 2
TEXTS = ("the ca", "she had", "a long, long text that leaves no room for an answer of its own in this model")


@pytest.fixture(scope="module")
def core(spoken, drafter):
    return make_engine(spoken, draft_model(K, drafter), max_num_seqs=2).core


@pytest.fixture(autouse=True)
def texts(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="jaxspec.engine.probe")
    monkeypatch.setattr(probe, "STARTUP_TEXTS", TEXTS)


def test_one_line_that_leaves_no_trace(core, caplog):
    num_compiles = core.compiles_after_ready  # of this test's own preparation
    probe.probe_at_start(core, 12)
    (line,) = caplog.messages
    assert "start-up probe: method 'draft_model' keeps 0." in line or "keeps 1." in line
    assert "mean acceptance length" in line
    assert core.compiles_after_ready == num_compiles
    assert core.metrics.acceptance().num_rounds == 0
    assert not core.has_work
    before = answers(core)
    probe.probe_at_start(core, 12)
    assert answers(core) == before


def answers(core):
    request = core.add_request("x", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=8))
    while not request.is_finished:
        core.step()
    return request.sequences[0].progress.token_ids


def test_answers_are_the_engines_own(core):
    (answer, _), stats = probe.answer_greedily(core, [[1, 2, 3], [4, 5]], 8)
    assert answer == answers(core)
    assert stats.num_output_tokens == 16
    assert stats.num_spec_tokens == K


@pytest.mark.parametrize(("num_steps", "is_warned"), [(probe.LEAST_STEPS, True), (probe.LEAST_STEPS - 1, False)])
def test_useless_drafting_is_warned_about(core, caplog, monkeypatch, num_steps, is_warned):
    stats = AcceptanceStats(K)
    for _ in range(num_steps):
        stats.observe(K, 0, 1)
    monkeypatch.setattr(probe, "answer_greedily", lambda *args: ([], stats))
    probe.probe_at_start(core, 12)
    (record,) = caplog.records
    assert (record.levelno == logging.WARNING) == is_warned
    assert ("drafting is useless" in record.message) == is_warned
    assert ("jaxspec doctor" in record.message) == is_warned


@pytest.mark.parametrize(
    ("method", "rule", "tokenizer", "host_proposer", "says"),
    [
        ("suffix", "coupled", "a tokenizer", "one", "none, since what method 'suffix' finds depends on the text"),
        ("ngram", "coupled", "a tokenizer", None, "none, since what method 'ngram' finds depends on the text"),
        ("custom", "coupled", "a tokenizer", "one", "none, since method 'custom' keeps what it sees"),
        ("draft_model", "synthetic", "a tokenizer", None, "none, since rule 'synthetic'"),
        ("draft_model", "coupled", None, None, "none (no tokenizer)"),
        (None, None, "a tokenizer", None, None),
    ],
)
def test_what_is_not_probed_is_said(method, rule, tokenizer, host_proposer, says, caplog):
    speculative = None if method is None else SimpleNamespace(method=method, rejection_sample_method=rule)
    parts = SimpleNamespace(tokenizer=tokenizer, host_proposer=host_proposer)
    config = SimpleNamespace(speculative_config=speculative, max_model_len=64)
    probe.probe_at_start(SimpleNamespace(config=config, parts=parts), 12)
    assert [says in message for message in caplog.messages] == ([] if says is None else [True])


def test_no_room_for_an_answer_is_said(core, caplog):
    probe.probe_at_start(core, 63)
    assert caplog.messages == ["start-up probe: none (max_model_len=64 is too short)"]
