"""Device. `jaxspec verify` says 0 to right engines and 1 to each known fault, put in place of the engine's judge."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ConfigError, SamplingParams
from jaxspec.engine import build
from jaxspec.engine.core import EngineCore
from jaxspec.sampling.logprobs import no_logprobs
from jaxspec.step import pack, rounds
from jaxspec.tools import verify
from jaxspec.tools.checks import rule_of
from jaxspec.types import Verdict
from tests.lossless import faults
from tests.lossless.engines import draft_model, full_sizes_alone, make_engine, ngram
from tests.oracle.folders import write_like, write_llama
from tests.quick import heavy_but, heavy_but_first
from tests.tools import faulty

V, K, ROWS = 8, 3, 64
PROMPTS = ([1, 2, 1], [3, 4, 5, 6], [7], [2, 2, 2, 2])
STANDARD = {"rejection_sample_method": "standard"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("verify") / "target", seed=8, vocab_size=V, head_spread=0.35)


@pytest.fixture(scope="module")
def drafter(model):
    return write_like(model.parent / "drafter", model, seed=2, noise=0.6)


@pytest.fixture(scope="module")
def prompts(model):
    file = model.parent / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt_token_ids": prompt}) for prompt in PROMPTS))
    return file


@pytest.fixture(scope="module")
def parts(model, drafter):
    """What engines are made of, by the name of their drafter or promise; each is built once."""
    configs = {
        "sampled": draft_model(K, drafter, "probabilistic"),
        "argmax": draft_model(K, drafter) | STANDARD,
        "equal": draft_model(K, model, "probabilistic"),
        "ngram": ngram(K) | STANDARD,
        "exact": ngram(K),
    }
    more = {"exact": {"exact": True, "dtype": "bfloat16"}}

    @functools.cache
    def built(name):
        engine = make_engine(
            model, configs[name], max_num_seqs=ROWS, max_model_len=32, block_size=8, **more.get(name, {})
        )
        return dataclasses.replace(engine.core.parts, state=engine.core.state)

    return built


@pytest.fixture(scope="module")
def parts_of(parts):
    """The same with another rule, or with one of `JUDGES` in place of the engine's own."""

    @functools.cache
    def rounds_of(name, rule, is_judged):
        return Rounds(parts(name), rule, is_judged)

    def parts_of(name, rule=None, judge=None):
        used = parts(name)
        if rule is not None:
            used = dataclasses.replace(used, target=used.target._replace(rule=rule))
        if rule is not None or judge is not None:
            used = dataclasses.replace(used, programs=rounds_of(name, rule, judge is not None))
        # Engines are built once, and lend a copy of their state: a run donates what it is given.
        weights = used.weights | {"judge": jnp.int32(0 if judge is None else tuple(JUDGES).index(judge))}
        return dataclasses.replace(
            used, state=jax.tree.map(jnp.copy, used.state), weights=weights if judge else used.weights
        )

    return parts_of


class Rounds:
    """An engine's programs with other rounds: by another rule, or judged by that of JUDGES which the weights name."""

    def __init__(self, parts, rule, is_judged):
        programs = self._programs = parts.programs
        self.shapes, self.spread = programs.shapes, programs.spread
        self.admit, self.prefill = programs.admit, self._prefill
        batch = pack.pack_batch([], [], ROWS, self.shapes.guard_row, self.shapes.pages_per_row)
        target = parts.target._replace(rule=rule or parts.target.rule)
        weights = parts.weights | ({"judge": jnp.int32(0)} if is_judged else {})
        run = functools.partial(rounds.decode_rounds, target, parts.proposer, 1)
        with pytest.MonkeyPatch.context() as patch:
            if is_judged:
                patch.setattr(rounds, "decode_round", judged_round)
            lowered = jax.jit(run, donate_argnums=1).lower(weights, parts.state, batch, np.int32(0))
        self.decode_rounds = lowered.compile()

    def _prefill(self, weights, state, chunk):
        return self._programs.prefill({key: weights[key] for key in weights if key != "judge"}, state, chunk)


def judged_round(target, proposer, weights, state, batch, *, widths=None):
    """`rounds.decode_round` with another judge, and a forward pass of one width."""
    drafts, state = rounds.propose(proposer, weights, state, batch)
    state, logits_BJV, _ = rounds.forward(target, proposer, weights, state, batch, drafts)
    view = rounds.row_view(state, batch)
    judges = [functools.partial(lambda judge, *words: judge(*words), judge) for judge in JUDGES.values()]
    verdict = jax.lax.switch(weights["judge"], judges, logits_BJV, drafts, view.table, view.len_B)
    logprobs = no_logprobs(*logits_BJV.shape[:2], target.max_logprobs)
    return rounds.commit(state, batch, verdict, drafts.counts_B, logprobs)


def often_wrong(logits_BJV, drafts, table, anchor_B):
    """Right, but for the first token of a round that begins with a fifth, tenth, … token."""
    verdict = faulty.greedy(None)(logits_BJV, drafts, table, anchor_B)
    is_wrong_B = anchor_B % 5 == 4
    wrong_B = (jnp.argmax(logits_BJV[:, 0], axis=1).astype(jnp.int32) + 1) % V
    only_BJ = jnp.where(jnp.arange(logits_BJV.shape[1])[None] == 0, wrong_B[:, None], -1)
    return Verdict(
        token_ids_BJ=jnp.where(is_wrong_B[:, None], only_BJ, verdict.token_ids_BJ),
        num_accepted_B=jnp.where(is_wrong_B, 0, verdict.num_accepted_B),
    )


JUDGES = {
    "sampler": faulty.sampler(None),
    "greedy": faulty.greedy(None),
    "often wrong": often_wrong,
    **{fault: faulty.sampler(fault) for fault in faults.SAMPLED_FAULTS},
    **{fault: faulty.greedy(fault) for fault in faults.GREEDY_FAULTS},
}


@pytest.fixture
def command(monkeypatch, parts_of, model, prompts):
    """Runs the command over an engine: its exit status."""

    def command(name, *words, **other):
        used = parts_of(name, **other)
        monkeypatch.setattr(verify, "build", lambda config, show_progress: used)
        return verify.main(
            ["--model", str(model), "--prompts", str(prompts), "--speculative-config", json.dumps(ngram(K)), "--json",
             "--ignore-eos", "true", *words]
        )  # fmt: skip

    return command


@pytest.fixture
def ask(command, capsys):
    """The same: (exit status, report)."""

    def ask(name, *words, **other):
        status = command(name, *words, **other)
        return status, json.loads(capsys.readouterr().out)

    return ask


@pytest.fixture
def ask_badly(command, capsys):
    """The same: (exit status, stderr), with nothing on stdout."""

    def ask_badly(name, *words):
        status = command(name, *words)
        out, err = capsys.readouterr()
        assert out == ""
        return status, err

    return ask_badly


SAMPLED = ("--temperature", "1.0", "--max-tokens", "12", "--n", "64")
GREEDY = ("--max-tokens", "20")

# The drafter that shows each of them, as in tests/lossless/test_distribution.py.
SAMPLED_FAULTS = {
    "draft and accept share a uniform": "sampled",
    "accept and resample share a uniform": "argmax",
    "residual is the target": "sampled",
    "residual is the target without the draft": "sampled",
    "residual keeps the draft": "argmax",
    "accepts with p alone": "sampled",
    "bonus from the row before": "equal",
}
GREEDY_FAULTS = {
    "emits the rejected draft": "ngram",
    "goes on after a rejection": "ngram",
    "bonus always from row K": "ngram",
    "judges a draft by the row after": "sampled",
    "divides by a temperature of -1": "ngram",
}


RIGHT = [("sampled", "standard"), ("argmax", "standard"), ("equal", "standard"), ("ngram", "standard")]
RIGHT += [("sampled", "block")]


@pytest.mark.parametrize("case", heavy_but(RIGHT, lambda case: case == ("sampled", "standard")), ids="-".join)
def test_a_right_engine_samples_losslessly(ask, case):
    name, rule = case
    status, report = ask(name, *SAMPLED, rule=None if rule == "standard" else rule)
    assert (status, report["verdict"], report["rule"], report["num_faults"]) == (0, "lossless", rule, 0)
    assert report["num_tokens"] == 64 * 12 * len(PROMPTS)
    groups = {test["group"] for test in report["tests"] if test["tested"]}
    # Drafting for itself, nothing is ever rejected.
    assert groups >= {"first", "second", "bonus", "neighbours"} | ({"after rejection"} if name != "equal" else set())
    assert report["acceptance"]["num_draft_tokens"] > 1000


@pytest.mark.parametrize("fault", heavy_but(SAMPLED_FAULTS, lambda fault: fault.startswith("draft")))
def test_a_sampled_fault_is_found(ask, fault):
    name = SAMPLED_FAULTS[fault]
    status, report = ask(name, *SAMPLED, judge=fault)
    assert (status, report["verdict"]) == (1, "fault")
    found = [entry for entry in report["faults"] if entry["kind"] == "distribution"]
    assert found
    assert all(entry["p"] < 1e-4 for entry in found)
    if fault == "bonus from the row before":
        assert {entry["group"] for entry in found} <= {"bonus", "neighbours"}


@pytest.mark.heavy
def test_the_judge_without_a_fault_passes(ask):
    """So it is the fault that is found, and not the way in which it was put there."""
    assert ask("sampled", *SAMPLED, judge="sampler")[0] == 0
    assert ask("ngram", *GREEDY, judge="greedy")[0] == 0


def test_every_fault_is_tried():
    assert tuple(SAMPLED_FAULTS) == faults.SAMPLED_FAULTS
    assert tuple(GREEDY_FAULTS) == faults.GREEDY_FAULTS


@pytest.mark.parametrize("name", ["ngram", "sampled"])
def test_a_right_engine_is_greedy_losslessly(ask, name):
    status, report = ask(name, *GREEDY)
    assert (status, report["verdict"], report["rule"]) == (0, "lossless", "greedy")
    assert (report["num_equal_answers"], report["num_ties"], report["num_faults"]) == (len(PROMPTS), 0, 0)


@pytest.mark.parametrize(("fault", "name"), heavy_but_first(GREEDY_FAULTS.items()))
def test_a_greedy_fault_is_found(ask, fault, name):
    status, report = ask(name, *GREEDY, judge=fault)
    assert (status, report["verdict"]) == (1, "fault")
    first = report["faults"][0]
    assert first["kind"] == "differs"
    assert first["token"] != first["expected"]
    assert first["gap"] > report["margin"]


def test_what_comes_after_a_difference_is_judged_too(ask):
    status, report = ask("ngram", *GREEDY, judge="often wrong")
    assert status == 1
    num_later = 0
    for index, prompt in enumerate(PROMPTS):
        found = [fault for fault in report["faults"] if fault["prompt"] == index]
        assert all((fault["position"] + len(prompt)) % 5 == 4 for fault in found)
        kinds = [fault["kind"] for fault in found]
        assert kinds == ["differs", *["unlike its prefix"] * (len(kinds) - 1)][: len(kinds)]
        num_later += max(0, len(kinds) - 1)
    assert num_later > 2


def test_what_lies_within_the_margin_is_a_tie(ask):
    words = ("ngram", *GREEDY)
    _, strict = ask(*words, judge="often wrong")
    status, report = ask(*words, "--margin", "100", judge="often wrong")
    assert (status, report["verdict"], report["num_faults"]) == (0, "lossless", 0)
    assert report["ties"] == strict["faults"]
    middle = float(np.median([fault["gap"] for fault in strict["faults"]]))
    status, report = ask(*words, "--margin", str(middle), judge="often wrong")
    assert status == 1
    assert max(tie["gap"] for tie in report["ties"]) <= middle < min(fault["gap"] for fault in report["faults"])


@pytest.mark.heavy
def test_coupled_answers_are_plain_decodings(ask):
    words = ("--temperature", "0.9", "--top-p", "0.9", "--top-k", "6", "--max-tokens", "20", "--n", "4")
    status, report = ask("ngram", *words, rule="coupled")
    assert (status, report["rule"], report["num_equal_answers"]) == (0, "coupled", 4 * len(PROMPTS))
    # Another sampler, of the right distribution, does not keep the promise.
    status, report = ask("ngram", *words, rule="coupled", judge="sampler")
    assert status == 1
    assert {"differs", "unlike its prefix"} <= {fault["kind"] for fault in report["faults"]}


def test_a_token_that_the_filters_remove_is_a_fault_with_its_position(ask):
    """The judge knows no top-k."""
    words = ("--temperature", "1.0", "--max-tokens", "12", "--n", "2", "--top-k", "2")
    assert ask("ngram", *words)[0] == 0
    status, report = ask("ngram", *words, judge="sampler")
    assert status == 1
    outside = [fault for fault in report["faults"] if fault["kind"] == "outside"]
    assert len(outside) > 4
    assert {fault["prompt"] for fault in outside} <= set(range(len(PROMPTS)))
    assert all(0 <= fault["position"] < 12 for fault in outside)


@pytest.mark.heavy
def test_exact_engines_differ_nowhere_and_no_difference_is_excused(ask):
    status, report = ask("exact", *GREEDY)
    assert (status, report["exact"], report["num_ties"], report["num_faults"]) == (0, True, 0, 0)
    assert report["num_equal_answers"] == len(PROMPTS)
    status, report = ask("exact", *GREEDY, "--margin", "100", judge="often wrong")
    assert status == 1
    assert {fault["kind"] for fault in report["faults"]} == {"differs"}


def test_the_command_builds_the_engine_it_is_told_to(monkeypatch, capsys, model, prompts):
    monkeypatch.setattr(build, "_buckets", full_sizes_alone)
    status = verify.main(
        [str(model), "--prompts", str(prompts), "--num-prompts", "2", "--max-num-seqs", "2", "--block-size", "8",
         "--speculative-config", json.dumps(ngram(K)), "--compilation-cache-dir", "null", *GREEDY]
    )  # fmt: skip
    out = capsys.readouterr().out
    assert status == 0
    assert "2 answers to 2 prompts, 40 tokens" in out
    assert "2 of 2 answers are plain decoding's, token for token" in out
    assert "lossless: 0 faults, 0 ties (logits within 0.001)" in out


@pytest.mark.heavy
def test_the_table_tells_what_is_wrong(ask, capsys):
    _, report = ask("ngram", *GREEDY, judge="often wrong")
    verify.print_table(report)
    out = capsys.readouterr().out
    first = report["faults"][0]
    assert f"FAULT: prompt 0 seed 0 position {first['position']}: token {first['token']}, expected" in out
    assert f"fault: {report['num_faults']} faults, 0 ties" in out
    _, report = ask("argmax", *SAMPLED, judge="residual keeps the draft")
    verify.print_table(report)
    assert "by_draft" in (out := capsys.readouterr().out)
    assert "  FAULT  (detects a shift of " in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--top-p", "2"], "top_p must be"),
        (["--temperature", "warm"], "temperature must be"),
        (["--bad-words", '["x"]'], "bad_words needs a tokenizer"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--promts", "x"], "did you mean ['--prompts'"),
        (["--prompts", "nowhere.jsonl"], "cannot read prompts from nowhere.jsonl"),
        (["--max-tokens", "1"], "not one token was drafted"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_verified_exits_2_and_says_why(ask_badly, words, says):
    status, err = ask_badly("ngram", *words)
    assert status == 2
    assert says in err


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"speculative_config": None}, "nothing to verify"), ({"rule": "synthetic"}, "does not promise lossless answers")],
)
def test_an_engine_that_promises_nothing_is_refused(parts_of, changes, says):
    used = parts_of("ngram")
    if "rule" in changes:
        used = dataclasses.replace(used, target=used.target._replace(**changes))
    else:
        used = dataclasses.replace(used, config=used.config.model_copy(update=changes))
    with pytest.raises(ConfigError, match=says):
        rule_of(EngineCore(used), SamplingParams(temperature=1.0))
