"""Device. `jaxspec doctor`: what is wrong with how a drafter was loaded is named, and what is not is left alone."""

import json

import numpy as np
import pytest

from jaxspec.engine import build
from jaxspec.tools import doctor
from jaxspec.tools.diagnosis import verdict_of
from jaxspec.tools.suspects import usual_suspects
from tests.lossless.engines import full_sizes_alone
from tests.oracle import knowing
from tests.oracle.folders import write_llama
from tests.oracle.head_folders import edit_config, write_eagle
from tests.oracle.heads import NumpyEagle
from tests.oracle.llama import NumpyLlama, continuation
from tests.tools.mutations import EAGLE3, K, Mutation, cases, load_pair, write_pair

NUM_TOKENS = 34


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return knowing.write_target(tmp_path_factory.mktemp("doctor") / "target")


def tried(pair, texts, only=None):
    """(acceptance as loaded, suspects) over texts that are known; no engine is compiled.

    pair: the target's folder and the speculative_config; only: suspects to try, where all of them would take the time
    that other cases have spent already.
    """

    def some_suspects(*args):
        return [suspect for suspect in usual_suspects(*args) if only is None or suspect.name in only]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "usual_suspects", some_suspects)
        config, parts = load_pair(*pair)
        _, drafter, mask_token_id = doctor.describe_pair(config)
        assert drafter is not None
        return doctor.try_suspects(parts, drafter, texts, mask_token_id)


def texts_of(starts=(3, 20)):
    whole = [knowing.text(start, 4 + NUM_TOKENS) for start in starts]
    return [(text[:4], text[4:]) for text in whole]


# Those of which every suspect is tried: none but the right one may be called as good.
WHOLE = ("order of embedding and state", "target layers one earlier")


OFTEN = ("eagle", "eagle3", "dflash", "mtp")


@pytest.mark.parametrize(
    ("method", "mutation"),
    cases(lambda mutation: mutation.named, lambda method, mutation: mutation.named in WHOLE and method in OFTEN),
)
def test_what_is_wrong_is_named(method, mutation, target, tmp_path):
    only = None if mutation.named in WHOLE else (mutation.named, "target layers in reverse")
    acceptance, (best, *others) = tried(write_pair(tmp_path, method, mutation, target), texts_of(), only)
    assert (best["name"], best["is_clear"]) == (mutation.named, True)
    assert best["setting"]
    assert min(best["acceptance_per_position"]) > 0.9
    assert min(acceptance.acceptance_per_position) < 0.3
    assert best["mean_acceptance_length"] > acceptance.mean_acceptance_length + 0.5
    assert not any(other["is_clear"] for other in others)
    assert others or only


@pytest.mark.parametrize(
    ("method", "mutation"), cases(lambda mutation: mutation.useless, lambda method, _: method in OFTEN)
)
def test_what_no_reading_explains_is_useless_and_nothing_is_named(method, mutation, target, tmp_path):
    pair = write_pair(tmp_path, method, mutation, target)
    acceptance, suspects = tried(pair, texts_of(), ("target layers one earlier", "norm_output", "heads one earlier"))
    assert suspects
    assert not any(suspect["is_clear"] for suspect in suspects)
    assert verdict_of(method, acceptance) == "useless"


def test_a_draft_model_with_another_rotation_is_named(tmp_path):
    """The target itself, but for its base; on texts of a random model, so that nothing is all or nothing."""
    model = write_llama(tmp_path / "target", seed=4, spread=0.6)
    draft = edit_config(write_llama(tmp_path / "draft", seed=4, spread=0.6), rope_theta=30.0)
    oracle, rng = NumpyLlama(model), np.random.default_rng(1)
    prompts = [rng.integers(0, 32, 12).tolist() for _ in range(2)]
    texts = [(prompt, continuation(oracle, prompt, 44).token_ids) for prompt in prompts]
    config = {"model": str(draft), "num_speculative_tokens": K}
    acceptance, (best, *others) = tried((model, config), texts)
    assert (best["name"], best["is_clear"]) == ("rope of the target", True)
    assert min(best["acceptance_per_position"]) == 1.0
    assert 0 < acceptance.acceptance_per_position[0] < 1
    assert not any(other["is_clear"] for other in others)


def test_a_head_that_is_right_has_nothing_named(target, tmp_path):
    acceptance, suspects = tried(write_pair(tmp_path, "eagle3", Mutation(), target), texts_of())
    assert min(acceptance.acceptance_per_position) == 1.0
    assert len(suspects) > 4
    assert not any(suspect["is_clear"] for suspect in suspects)


def test_a_replay_keeps_what_a_naive_computation_keeps(tmp_path):
    """At every position, prompts of many lengths, one of them of one token."""
    model = write_llama(tmp_path / "target", seed=4)
    head = write_eagle(tmp_path / "head", "eagle3", seed=3, draft_vocab_size=20, is_speculators=True,
                       stored=("embed_tokens", "t2d"))  # fmt: skip
    oracle, naive = NumpyLlama(model), NumpyEagle(head, NumpyLlama(model), "eagle3")
    texts = [(prompt, continuation(oracle, prompt, 16).token_ids) for prompt in ([7], list(range(11)))]
    acceptance, _ = tried((model, {"model": str(head), "num_speculative_tokens": K}), texts, ("norm_output",))
    histogram = [0] * (K + 1)
    for prompt, answer in texts:
        # Of an answer's end nobody knows what would follow: the last rounds do not count.
        whole, at = prompt + answer, len(prompt)
        while at < len(whole) - K:
            drafts = naive.drafts(whole[:at], K)
            right = [draft == token for draft, token in zip(drafts, whole[at:], strict=False)]
            kept = [*right, False].index(False)
            histogram[kept] += bool(drafts)
            at += kept + 1
    assert acceptance.histogram == histogram
    assert 0 < sum(histogram[1:]) < sum(histogram)


@pytest.mark.heavy
def test_the_command(target, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(build, "_buckets", full_sizes_alone)
    _, config = write_pair(tmp_path, "eagle3", EAGLE3["layers one too high"], target)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": text}) + "\n" for text, _ in texts_of((3, 20, 9))))
    words = {"prompts": prompts, "num-prompts": 2, "max-tokens": 24, "max-model-len": 64, "block-size": 8,
             "max-num-batched-tokens": 16, "compilation-cache-dir": "null", "gpu-memory-utilization": 0.2}  # fmt: skip
    flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(doctor, "usual_suspects", lambda *args: list(usual_suspects(*args))[:1])
    assert doctor.main([str(target), "--speculative-config", json.dumps(config), "--json", *flags]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    report, told = json.loads(last), "\n".join(lines)
    assert (report["method"], report["verdict"], report["num_prompts"]) == ("eagle3", "useless", 2)
    assert report["better"] == '"eagle_aux_hidden_state_layer_ids": [2, 3, 4] in speculative_config'
    assert report["shared"] == {"embedding": "the target's", "vocabulary head": "its own"}
    assert report["skipped"] == ["t2d"]
    assert max(report["acceptance"]["acceptance_per_position"]) < 0.1
    for said in (
        "method 'eagle3' (tensor 'd2t')", "shared     embedding: the target's", "mapped     32 draft tokens",
        "skipped    t2d", "streams: (3, 4, 5)", "useless: hardly a draft", "BETTER     target layers one earlier",
"of the drafts, by position (usual for the first: 0.50 to 0.98)",
        f"  set      {report['better']}",
    ):  # fmt: skip
        assert said in told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "there is no drafter to examine"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--max-num-seqs", "2"], "max_num_seqs=2 must hold all 3 prompts"),
        (["--rule"], "rejection_sample_method 'synthetic' keeps drafts whatever they are"),
        (["--promts", "x"], "did you mean ['--prompts'"),
        (["--prompts", "nowhere.jsonl"], "cannot read prompts from nowhere.jsonl"),
    ],
)
def test_what_cannot_be_examined_exits_2_and_says_why(words, says, target, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt_token_ids": [{first}]}}\n' for first in (1, 2, 3)))
    config = {"method": "ngram", "num_speculative_tokens": 2}
    if words == ["--rule"]:
        words, config = [], config | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
    elif not words:
        config = None
    flags = ["--prompts", str(tmp_path / "prompts.jsonl"), "--speculative-config", json.dumps(config), *words]
    assert doctor.main([str(target), *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_drafter_that_does_not_load_is_refused_by_name(target, tmp_path, capsys):
    _, config = write_pair(tmp_path, "eagle3", EAGLE3["wrong fc width"], target)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": [1, 2]}))
    assert doctor.main([str(target), "--speculative-config", json.dumps(config), "--prompts", str(prompts)]) == 2
    assert "fc.weight [32, 48]" in capsys.readouterr().err
