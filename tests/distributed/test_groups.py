"""Device. What several groups of devices do as one engine: programs that fail, requests that leave, records, counts of
drafts that are chosen, proposers and processors of the user's own."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.cli import main
from jaxspec.sampling.processors import LogitsProcessor
from tests.lossless.engines import MAX_MODEL_LEN, VOCAB_SIZE, custom, draft_model, make_engine, ngram
from tests.lossless.replay import HostReplay, Script, replay_proposer, set_scripts
from tests.lossless.test_every_proposer import answer_of, make_requests
from tests.oracle.folders import write_like, write_llama
from tests.oracle.llama import NumpyLlama, assert_says

pytestmark = pytest.mark.heavy
K = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("groups")
    target = write_llama(root / "target", seed=4, vocab_size=VOCAB_SIZE, num_heads=8, num_kv_heads=4)
    return target, write_like(root / "drafter", target, seed=1, noise=0.2)


def start(core, requests):
    return [core.add_request(str(at), {"prompt_token_ids": ids}, one) for at, (ids, one) in enumerate(requests)]


def test_what_fails_begins_again_and_who_leaves_frees_its_pages(folders):
    """Few pages, so that sequences lose theirs; some leave; a program fails, and takes every group's state with it."""
    target, drafter = folders
    engine = make_engine(target, draft_model(K, drafter), data_parallel_size=2, num_pages=18)
    core, oracle = engine.core, NumpyLlama(target)
    requests = make_requests(seed=3)
    running = start(core, requests)
    decode, calls = core._programs.decode_rounds, []

    def failing(*args):
        calls.append(1)
        output = decode(*args)
        if len(calls) in (3, 11):
            raise RuntimeError("the device failed")
        return output

    core._programs.decode_rounds = failing
    used = set()
    while core.has_work:
        core.step()
        core.scheduler.audit()
        used |= {one.state.group for request in running for one in request.sequences if one.state.row >= 0}
        if len(calls) == 6:
            core.abort("2")
            core.abort("5")
            core.scheduler.audit()
    core._programs.decode_rounds = decode
    assert used == {0, 1}
    assert core.scheduler.num_used == 0
    assert core.metrics.snapshot()["vllm:num_preemptions"] > 6  # by failures, and for want of pages
    for request, (prompt, params) in zip(running, requests, strict=True):
        (answer,) = request.output().outputs
        wanted = answer_of(oracle, prompt, params)
        assert_says(answer.token_ids, wanted.cut(len(answer.token_ids)) if answer.finish_reason == "abort" else wanted)


def test_a_record_comes_out_again(folders, tmp_path, capsys):
    file, (target, _) = tmp_path / "journal.jsonl", folders
    settings = {"data_parallel_size": 3, "max_num_seqs": 1, "rounds_per_batch": 2, "async_scheduling": True}
    engine = make_engine(target, ngram(K), record=str(file), **settings)
    start(engine.core, make_requests(seed=3))
    while engine.core.has_work:
        engine.core.step()
    assert main(["replay", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["difference"], report["num_tokens"] > 100) == (None, True)


@pytest.mark.parametrize("is_on_host", [True, False])
def test_proposers_of_the_users_own(folders, is_on_host):
    """No vocabulary is split, so each group runs them as a single device would."""
    target, _ = folders
    proposer = HostReplay(K) if is_on_host else replay_proposer(K, MAX_MODEL_LEN)
    requests, oracle = make_requests(seed=3), NumpyLlama(target)
    answers = [answer_of(oracle, prompt, params) for prompt, params in requests]
    engine = make_engine(target, custom(K), proposer=proposer, data_parallel_size=2)
    scripts = [Script(prompt + answer.token_ids) for (prompt, _), answer in zip(requests, answers, strict=True)]
    set_scripts(engine, proposer, scripts)
    running = start(engine.core, requests)
    while engine.core.has_work:
        engine.core.step()
    for request, answer in zip(running, answers, strict=True):
        assert_says(request.output().outputs[0].token_ids, answer)
        figures = request.output().metrics.speculative_decoding
        assert figures["num_accepted_draft_tokens"] == figures["num_draft_tokens"] > 0


def test_processors_of_the_users_own(folders):
    """Compiled into every round; each row's columns are its own."""
    first = LogitsProcessor(
        lambda params: np.int32((params.extra_args or {}).get("first", 0)),
        lambda logits_BJV, first_B, context: jnp.where(
            jnp.arange(logits_BJV.shape[-1])[None, None] < first_B[:, None, None], -jnp.inf, logits_BJV
        ),
    )
    prompts = [{"prompt_token_ids": [5, 9, 2, 5, 9, index]} for index in range(5)]
    firsts = [0, 20, 3, 0, 25]
    params = [SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, extra_args={"first": at}) for at in firsts]
    answers = []
    for groups in (1, 2):
        engine = make_engine(folders[0], ngram(K), logits_processors=[first], data_parallel_size=groups)
        outputs = engine.generate(prompts, params, use_tqdm=False)
        answers.append([one.outputs[0].token_ids for one in outputs])
    assert answers[0] == answers[1]
    assert all(min(ids) >= at for ids, at in zip(answers[1], firsts, strict=True))
