"""Device. An engine on a mesh answers as the naive loop does, whoever guesses, and gathers nothing to do so."""

import re

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxspec import ConfigError, SamplingParams
from tests.lossless.again import ask_again
from tests.lossless.engines import VOCAB_SIZE, draft_model, make_engine, ngram
from tests.lossless.test_every_proposer import answer_of, make_requests
from tests.oracle.automata import EOS, LOOP, add_byte_level_tokenizer
from tests.oracle.folders import TINY, write_like, write_llama
from tests.oracle.head_folders import write_eagle
from tests.oracle.hlo import large_moves
from tests.oracle.llama import NumpyLlama, assert_says
from tests.quick import heavy_but, heavy_but_first

K = 3
# name: devices, heads and key heads, config of the engine; a drafter's folder is put in by name.
CASES = {
    "draft_model": (4, (8, 4), draft_model(K, "drafter")),
    "ngram, key heads repeated": (8, (8, 4), ngram(K)),
    "ngram, heads filled up": (2, (9, 3), ngram(K)),
    "self": (2, (8, 4), {"method": "self", "num_speculative_tokens": K}),
    "suffix": (
        2, (8, 4), {"method": "suffix", "num_speculative_tokens": K, "suffix_decoding_max_cached_requests": 0},
    ),
    "whole draft_model": (2, (8, 4), draft_model(K, "drafter", draft_tensor_parallel_size=1)),
    "ngram+draft_model": (4, (8, 4), draft_model(K, "drafter") | {"method": "ngram+model"}),
    "probabilistic": (4, (8, 4), draft_model(K, "drafter", "probabilistic")),
    "eagle3": (2, (8, 4), {"model": "eagle3", "num_speculative_tokens": K}),
    "whole eagle3, probabilistic": (
        2, (8, 4), {"model": "eagle3", "num_speculative_tokens": K, "draft_tensor_parallel_size": 1,
                    "draft_sample_method": "probabilistic"},
    ),
    "auto": (2, (8, 4), ngram(K) | {"num_speculative_tokens": "auto"}),
    "plain": (1, (8, 4), None),
}  # fmt: skip
MESHES = [(1, 1), (3, 1), (2, 2)]  # (devices of a group, groups)
# (name, devices of a group, groups, more config): each a mesh of its own for one of the above.
GROUPS = [
    *(("ngram, key heads repeated", n, 2, {}) for n in (1, 2, 4)),
    *(("draft_model", n, 2, {}) for n in (2, 4)),
    ("draft_model", 1, 3, {"rounds_per_batch": 4, "async_scheduling": True}),
    *((name, 1, 2, {}) for name in ("plain", "auto", "probabilistic")),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes models once, by their heads."""
    root, made = tmp_path_factory.mktemp("mesh"), {}

    def folder(heads):
        if heads not in made:
            sizes = {"vocab_size": VOCAB_SIZE, "num_heads": heads[0], "num_kv_heads": heads[1]}
            target = write_llama(root / f"{heads[0]}", seed=4, **sizes)
            drafter = write_like(root / f"{heads[0]}-drafter", target, seed=1, noise=0.2)
            head = write_eagle(root / f"{heads[0]}-eagle3", "eagle3", streams=(0, 1), draft_vocab_size=20)
            made[heads] = {"target": target, "drafter": drafter, "eagle3": head}
        return made[heads]

    return folder


def engine_of(folders, name, **more):
    devices, heads, speculative = CASES[name]
    own = folders(heads)
    if speculative is not None and speculative.get("model") in own:
        speculative = speculative | {"model": str(own[speculative["model"]])}
    more = {"tensor_parallel_size": devices} | more
    return make_engine(own["target"], speculative, **more)


def ask(engine, requests):
    prompts, params = [{"prompt_token_ids": ids} for ids, _ in requests], [one for _, one in requests]
    return engine.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("name", heavy_but([n for n in CASES if n != "plain"], lambda name: name == "draft_model"))
def test_answers_are_those_of_the_naive_loop(folders, name):
    check_answers(folders, name)


@pytest.mark.parametrize(("name", "n", "groups", "more"), heavy_but_first(GROUPS))
def test_so_are_those_of_several_groups(folders, name, n, groups, more):
    engine = check_answers(folders, name, tensor_parallel_size=n, data_parallel_size=groups, **more)
    len_NR, is_finished_NR = (np.asarray(getattr(engine.core.state, name)) for name in ("len_R", "is_finished_R"))
    assert (len_NR.max(axis=1) > 0).all(), "each had rows"
    assert (len_NR[:, -1] == 0).all(), "and the guard row is nobody's"
    assert is_finished_NR[:, -1].all()


def check_answers(folders, name, **more):
    engine = engine_of(folders, name, **more)
    before = engine.core.compiles_after_ready  # by what the test has done to the pages
    requests = make_requests(seed=3)
    outputs = ask(engine, requests)
    oracle = NumpyLlama(folders(CASES[name][1])["target"])
    rule = engine.config.speculative_config and engine.config.speculative_config.rejection_sample_method
    is_certain = []
    for output, (prompt, params) in zip(outputs, requests, strict=True):
        answer = answer_of(oracle, prompt, params)
        is_fixed = params.is_greedy or rule in (None, "coupled")
        if is_fixed:
            assert_says(output.outputs[0].token_ids, answer)
        is_certain.append(is_fixed and min(answer.leads) > 1e-3)
    assert engine.core.compiles_after_ready == before
    if rule not in (None, "coupled"):  # drawn otherwise, but by the same keys as on one device
        alone = ask(engine_of(folders, name, **more | {"tensor_parallel_size": 1, "data_parallel_size": 1}), requests)
        assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in alone]
    if name != "auto":  # what is drafted goes by the clock
        ask_again(engine, requests, outputs, is_certain)
    check_round(engine)
    return engine


def check_round(engine):
    """Nothing is gathered, what is added up is small, and pages and weights stay where they are. Groups hear nothing of
    each other."""
    parts, config = engine.core.parts, engine.config
    rows, K = engine.config.max_num_seqs, engine.config.num_speculative_tokens
    names = [entry.name for entry in parts.programs.plan if entry.name.startswith(("decode_rounds", "verify_commit"))]
    rounds = [parts.programs.compiled(name) for name in names]
    assert rounds
    for program in rounds:
        text = program.as_text()
        assert not re.search(r"all-gather|all-to-all|collective-permute|reduce-scatter", text)
        sums = re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-reduce", text)
        assert bool(sums) == (config.tensor_parallel_size > 1)
        together = {len(group.split(",")) for group in re.findall(r"all-reduce\(.*replica_groups=\{\{([\d,]+)", text)}
        assert together <= {config.tensor_parallel_size}
        # Hidden states of a round, or a few numbers a row.
        most = rows * max(K + 1, 4) * parts.target.config.hidden_size
        assert all(np.prod([int(size) for size in sizes.split(",") if size]) <= most for sizes in sums)
        held = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves((parts.weights, engine.core.state))]
        ndim = 4 + (config.data_parallel_size > 1)
        pools = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(engine.core.state) if leaf.ndim == ndim]
        moved = large_moves(text, {pool.size for pool in pools})
        assert moved == []
        assert program.memory_analysis().alias_size_in_bytes >= sum(pool.nbytes for pool in pools)
        assert program.memory_analysis().argument_size_in_bytes <= 2 * sum(leaf.nbytes for leaf in held)
    for pool in jax.tree.leaves((engine.core.state.pool, engine.core.state.proposer)):
        assert len(pool.sharding.device_set) == config.tensor_parallel_size * config.data_parallel_size


@pytest.mark.heavy
@pytest.mark.parametrize("more", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}, {"exact": True}])
def test_integers_and_exact_rounds(folders, more):
    """The integers are one device's, whatever part of a row a device has."""
    requests = make_requests(seed=3)
    engines = [engine_of(folders, "ngram, heads filled up", **more, tensor_parallel_size=n) for n in (1, 2)]
    alone, found = (ask(engine, requests) for engine in engines)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in alone]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "by_expert", "groups"),
    [
        ("qwen3-moe-mixed", True, 1),
        ("deepseek-v3-mtp", False, 1),
        ("qwen3-moe-mixed", True, 2),
        ("deepseek-v3-mtp", False, 2),
    ],
)
def test_experts_and_modules(name, by_expert, groups):
    """Experts are split among the devices of a group."""
    method = {"method": "mtp", "num_speculative_tokens": 2} if "mtp" in name else ngram(K)
    meshes = {"tensor_parallel_size": 2, "data_parallel_size": groups, "enable_expert_parallel": by_expert}
    engines = [make_engine(TINY / name, method, **mesh) for mesh in ({}, meshes)]
    requests = [([5, 9, 2, 7, 5, 9], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)),
                ([8, 8, 1], SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True))]  # fmt: skip
    alone, found = (ask(engine, requests) for engine in engines)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in alone]
    check_round(engines[1])


@pytest.mark.heavy
def test_rounds_in_three_parts_and_traces(tmp_path):
    """A grammar's masks and a request's own processors see the vocabulary, and nothing behind it: 3 devices do not
    divide it."""
    sizes = {"vocab_size": VOCAB_SIZE, "num_heads": 8, "num_kv_heads": 4, "eos_token_id": EOS}
    target = add_byte_level_tokenizer(write_llama(tmp_path / "target", seed=4, **sizes))
    seen = []

    def forbid(token_ids, logits):
        seen.append(logits.shape)
        logits[3::2] = -np.inf
        return logits

    asked = [
        SamplingParams(temperature=0, max_tokens=9, structured_outputs=dict(LOOP.constraint)),
        SamplingParams(temperature=0, max_tokens=9, logits_processors=[forbid], ignore_eos=True),
        SamplingParams(temperature=0.9, seed=1, max_tokens=9, logprobs=4, prompt_logprobs=2, ignore_eos=True),
    ]
    prompts = [{"prompt_token_ids": ids} for ids in ([3, 9, 3, 9, 3, 9, 3], [21, 5, 8], [4, 4, 7, 4])]
    found = []
    for n, groups in MESHES:
        engine = make_engine(
            target,
            ngram(K),
            tensor_parallel_size=n,
            data_parallel_size=groups,
            enable_structured_outputs=True,
        )
        outputs = engine.generate(prompts, asked, use_tqdm=False)
        traced = engine.trace(prompts[0], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        found.append((outputs, traced))
    (alone, traced_alone), *others = found
    assert set(seen) == {(VOCAB_SIZE,)}
    for split, traced in others:
        assert [one.outputs[0].token_ids for one in split] == [one.outputs[0].token_ids for one in alone]
        for one, other in zip(traced, traced_alone, strict=True):
            assert one.token_ids == other.token_ids
            np.testing.assert_allclose(one.target_logits_JV, other.target_logits_JV, rtol=0, atol=1e-4)
        for name in ("logprobs", "prompt_logprobs"):
            pairs = zip(*(_entries(output[2], name) for output in (split, alone)), strict=True)
            for one, other in pairs:
                assert list(one) == list(other)
                np.testing.assert_allclose(list(one.values()), list(other.values()), atol=1e-4)


def _entries(output, name):
    """[{token: log-probability}] of the prompt's tokens, or the answer's."""
    entries = output.prompt_logprobs[1:] if name == "prompt_logprobs" else output.outputs[0].logprobs
    return [{token: one.logprob for token, one in entry.items()} for entry in entries]


def test_what_cannot_be_split_is_refused_by_name(folders):
    own = folders((8, 4))
    eagle3 = {"model": str(own["eagle3"]), "num_speculative_tokens": K}
    refused = {
        "must not exceed the model's 8 attention heads": (None, 16),
        "the draft: tensor_parallel_size=8 must not exceed the model's 4 attention heads": (eagle3, 8),
        "drawn drafts over a draft vocabulary": (eagle3 | {"draft_sample_method": "probabilistic"}, 2),
    }
    for says, (speculative, n) in refused.items():
        with pytest.raises(ConfigError, match=re.escape(says)):
            make_engine(own["target"], speculative, tensor_parallel_size=n)
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 x data_parallel_size=3 must not exceed the 8"):
        make_engine(own["target"], tensor_parallel_size=4, data_parallel_size=3)


@pytest.mark.heavy
def test_programs_are_kept_for_their_mesh_alone(folders, tmp_path):
    """A second start on as many devices compiles nothing, one on others everything; all say the same."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))  # what JAX's own cache had is not kept
    compilation_cache.reset_cache()
    try:
        answers = []
        for groups, is_kept in ((1, False), (2, False), (2, True)):
            kept = {"data_parallel_size": groups, "compilation_cache_dir": str(tmp_path / "kept")}
            engine = engine_of(folders, "self", **kept)
            assert {entry.was_kept for entry in engine.core.parts.programs.plan} == {is_kept}
            answers.append([one.outputs[0].token_ids for one in ask(engine, make_requests(seed=3)[:4])])
        assert answers[0] == answers[1] == answers[2]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
