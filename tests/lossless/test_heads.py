"""Device. Trained heads as drafters: they guess what an independent computation says, in every round, and no answer
changes by them."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ConfigError, SamplingParams
from jaxspec.cache.pages import pool_shape
from jaxspec.models.heads import eagle as eagle_head
from jaxspec.models.heads.load import load_head, open_head
from jaxspec.models.registry import family_of
from jaxspec.proposers.dflash import dflash
from jaxspec.proposers.eagle import eagle
from jaxspec.proposers.medusa import medusa
from jaxspec.step import rounds
from jaxspec.weights.checkpoint import open_checkpoint
from jaxspec.weights.load import load
from tests.lossless.again import ask_again
from tests.lossless.engines import MAX_MODEL_LEN, custom, make_engine
from tests.lossless.misled import expected_histogram, wrong_every
from tests.lossless.test_every_proposer import answer_of, copied, histogram_of, make_requests
from tests.lossless.test_parallel import watch
from tests.oracle import head_folders
from tests.oracle.folders import DRAFTERS, TINY, write_folder
from tests.oracle.goldens import read_golden
from tests.oracle.head_folders import edit_config
from tests.oracle.heads import NumpyEagle, NumpyMedusa, NumpyMimo, NumpyMlpSpeculator
from tests.oracle.llama import NumpyLlama, assert_says
from tests.quick import heavy_but

# That each file is read and run as it should is shown in tests/models/test_heads.py.
GOLDENS = ("eagle3", "dflash", "qwen3-body-next-mtp")


@pytest.mark.parametrize("name", heavy_but(GOLDENS, lambda name: name == "eagle3"))
def test_the_first_round_on_a_golden_target_drafts_what_its_authors_code_did(name):
    """The method is told by the drafter's files; the drafts, and the whole answer, are the recorded ones."""
    kind = dict(DRAFTERS)[name]
    case, expected = json.loads((TINY / name / "case.json").read_text()), read_golden(name)
    target = name if kind == "mtp" else case["target"].removeprefix("../")
    drafts = expected[{"mtp": "mtp_draft_tokens", "dflash": "pass1_tokens"}.get(kind, "draft_tokens")].tolist()
    context = expected["mtp_context_ids" if kind == "mtp" else "context_ids"][:17].tolist()
    config = {"method": "mtp"} if kind == "mtp" else {"model": str(TINY / name)}
    engine = make_engine(TINY / target, config | {"num_speculative_tokens": len(drafts)}, max_num_seqs=1)
    assert engine.config.speculative_config.method == kind
    greedy = read_golden(target)
    params = SamplingParams(temperature=0, max_tokens=len(greedy["greedy_tokens"]), ignore_eos=True)
    prompt = {"prompt_token_ids": greedy["input_ids"][0].tolist()}
    assert engine.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == greedy["greedy_tokens"].tolist()
    assert first_drafts(engine, context) == drafts


def first_drafts(engine, prompt):
    """What a request's first round guesses: brought in as the engine does it, then `propose` alone."""
    core, parts = engine.core, engine.core.parts
    core.add_request("first", {"prompt_token_ids": prompt}, SamplingParams(temperature=0, ignore_eos=True))
    propose = jax.jit(functools.partial(rounds.propose, parts.proposer))
    found = []

    def look(weights, state, batch, num_rounds):
        drafts, _ = propose(weights, state, batch)
        found.append(np.asarray(drafts.token_ids_BK)[0].tolist())
        return decode_rounds(weights, state, batch, num_rounds)

    decode_rounds, parts.programs.decode_rounds = parts.programs.decode_rounds, look
    while not found:
        core.step()
    core.abort("first")
    return found[0]


# name: (K, how to write the folder, its numpy twin)
HEADS = {
    "eagle": (
        5,
        lambda folder: head_folders.write_eagle(folder, "eagle", seed=1, num_layers=2, biases=("fc",)),
        functools.partial(NumpyEagle, kind="eagle"),
    ),
    "eagle3": (
        7,
        lambda folder: head_folders.write_eagle(
            folder, "eagle3", seed=3, draft_vocab_size=20, is_speculators=True, stored=("embed_tokens", "t2d")
        ),
        functools.partial(NumpyEagle, kind="eagle3"),
    ),
    "medusa": (2, lambda folder: head_folders.write_medusa(folder, seed=5), NumpyMedusa),
    "mlp_speculator": (1, lambda folder: head_folders.write_mlp_speculator(folder, seed=6), NumpyMlpSpeculator),
}


def assert_drafts(seen, guess, K):
    """Every draft of every round, those too that are not kept. seen: what `watch` saw."""
    for ids, room, drafts in seen:
        assert drafts == guess(ids, K)[:room]


@pytest.mark.parametrize("name", heavy_but(HEADS, lambda name: name == "eagle3"))
def test_answers_are_those_of_the_naive_loop(name, tmp_path, target, target_oracle):
    """Requests of many lengths that join and leave, greedy and sampled, one to the model's end: every round's drafts
    are a naive computation's, or the histogram of what was kept would differ."""
    K, write, twin = HEADS[name]
    oracle = twin(write(tmp_path / "head"), target_oracle)
    config, guess = {"model": str(tmp_path / "head"), "num_speculative_tokens": K}, oracle.drafts
    if name == "eagle":  # its state is kept through rounds that looked up
        config |= {"method": "ngram+model", "prompt_lookup_min": 2, "prompt_lookup_max": 3}
        guess = lambda ids, limit: copied(ids, 2, 3, limit) or oracle.drafts(ids, limit)  # noqa: E731
    engine = make_engine(target, config, rounds_per_batch=4 if K % 2 == 0 else 1)
    requests, seen = make_requests(seed=K), watch(engine) if K % 2 else []
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    assert_drafts(seen, guess, K)
    engine.core.scheduler.audit()
    assert engine.config.speculative_config.method == ("ngram+eagle" if name == "eagle" else name)
    num_drafted = 0
    for output, (prompt, params) in zip(outputs, requests, strict=True):
        answer = answer_of(target_oracle, prompt, params)
        assert_says(output.outputs[0].token_ids, answer)
        if min(answer.leads) > 1e-3:
            wanted = histogram_of(K, prompt, answer.token_ids, guess)
            assert output.metrics.speculative_decoding["acceptance_histogram"] == wanted
            num_drafted += sum(wanted)
    assert num_drafted > 30
    ask_again(engine, requests, outputs, [min(answer_of(target_oracle, *one).leads) > 1e-3 for one in requests])


@pytest.mark.heavy
@pytest.mark.parametrize(("num_modules", "K"), [(3, None), (3, 2), (2, 4), (1, 3)])
def test_modules_guess_what_a_naive_computation_does(num_modules, K, tmp_path):
    """MiMo's kind, which reads the state before the final norm: module k guesses the token k + 2 places on, its
    entries made with drafts are made again, and the last one goes on alone."""
    folder = head_folders.write_mimo(tmp_path / "mimo", seed=7, num_modules=num_modules)
    target = NumpyLlama(folder)
    engine = make_engine(folder, {"method": "mtp", "num_speculative_tokens": K}, rounds_per_batch=1)
    K = K or num_modules
    assert engine.config.speculative_config.num_speculative_tokens == K
    requests, seen = make_requests(seed=7), watch(engine)
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    assert_drafts(seen, NumpyMimo(target).drafts, K)
    num_kept = 0
    for output, (prompt, params) in zip(outputs, requests, strict=True):
        answer = answer_of(target, prompt, params)
        assert_says(output.outputs[0].token_ids, answer)
        if min(answer.leads) > 1e-3:
            wanted = histogram_of(K, prompt, answer.token_ids, NumpyMimo(target).drafts)
            assert output.metrics.speculative_decoding["acceptance_histogram"] == wanted
            num_kept += sum(wanted[1:])
    assert num_kept > 5
    ask_again(engine, requests, outputs, [min(answer_of(target, *one).leads) > 1e-3 for one in requests])


# T3: a target whose next token is a permutation of its last one, and heads that know it.

SIZE, MOST, EVERY, NUM_TOKENS = 32, 4, 7, 90
NEXT = np.random.default_rng(0).permutation(SIZE)


def write_permutation(folder):
    """One layer that adds nothing: hidden states are one-hot, and the head looks the successor up."""
    one, none = np.eye(SIZE, dtype=np.float32), np.zeros((SIZE, SIZE), np.float32)
    follow = np.zeros((SIZE, SIZE), np.float32)
    follow[NEXT, np.arange(SIZE)] = 1.0
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": SIZE, "intermediate_size": SIZE,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
        "vocab_size": SIZE, "hidden_act": "silu", "rms_norm_eps": 1e-9, "tie_word_embeddings": False,
    }  # fmt: skip
    layer = {f"self_attn.{part}_proj.weight": none for part in "qkvo"}
    layer |= {f"mlp.{part}_proj.weight": none for part in ("gate", "up", "down")}
    layer |= {f"{part}_layernorm.weight": np.ones(SIZE, np.float32) for part in ("input", "post_attention")}
    weights = {f"model.layers.0.{name}": tensor for name, tensor in layer.items()}
    weights |= {"model.embed_tokens.weight": one, "model.norm.weight": np.ones(SIZE, np.float32)}
    return write_folder(folder, config, weights | {"lm_head.weight": follow}), config, layer, follow


def write_knowing_head(folder, name, config, layer, follow):
    """A head that is always right: by the token it is fed, or by the target's state alone, stepping it on itself."""
    one, none, s = np.eye(SIZE, dtype=np.float32), np.zeros((SIZE, SIZE), np.float32), np.sqrt(SIZE)
    ones = np.ones(SIZE, np.float32)
    if name == "medusa":
        powers = [np.linalg.matrix_power(follow, i + 2) for i in range(MOST)]
        w = {f"{i}.0.linear.weight": none for i in range(MOST)} | {f"{i}.1.weight": p for i, p in enumerate(powers)}
        return write_folder(folder, {"medusa_num_heads": MOST, "medusa_num_layers": 1}, w)
    # The MLP reads a normed one-hot, s times it, and moves it to its successor.
    steps = {
        "mlp.gate_proj.weight": one,
        "mlp.up_proj.weight": one,
        "mlp.down_proj.weight": ((follow - one) / (s / (1 + np.exp(-s)) * s)).astype(np.float32),
    }
    if name == "dspark":  # the Markov head alone, over a backbone and a head that say nothing
        w = {f"layers.0.{key}": tensor for key, tensor in layer.items()}
        w |= {f"layers.0.self_attn.{part}_norm.weight": np.ones(SIZE // 4, np.float32) for part in "qk"}
        w |= {"fc.weight": none, "hidden_norm.weight": ones, "norm.weight": ones, "lm_head.weight": none}
        w |= {"markov_head.markov_w1.weight": one, "markov_head.markov_w2.weight": follow}
        block = {"block_size": MOST, "mask_token_id": 0, "target_layer_ids": [0], "markov_rank": SIZE}
        return write_folder(folder, config | block | {"architectures": ["Qwen3DSparkModel"], "head_dim": SIZE // 4}, w)
    if name in ("eagle3", "p_eagle"):
        wide = {f"self_attn.{part}_proj.weight": np.zeros((SIZE, 2 * SIZE), np.float32) for part in "qkv"}
        w = {f"midlayer.{key}": tensor for key, tensor in (layer | steps | wide).items()}
        w |= {"midlayer.hidden_norm.weight": ones, "fc.weight": np.concatenate([one, none], axis=1)}
        w |= {"norm.weight": ones, "lm_head.weight": follow, "d2t": np.zeros(SIZE, np.int64)}
        if name == "p_eagle":
            w |= looks_one_back(s, follow) | {"mask_hidden": np.zeros((1, 1, 2 * SIZE), np.float32)}
            config = config | {"mask_token_id": 0}
        return write_folder(folder, config | {"eagle_aux_hidden_state_layer_ids": [0, 1]}, w)
    layer = {key: tensor for key, tensor in layer.items() if key != "input_layernorm.weight"}
    w = {f"layers.0.{key}": tensor for key, tensor in layer.items()}
    w["fc.weight"] = np.concatenate([one, none], axis=1)
    return write_folder(folder, config, w)


def looks_one_back(s, follow):
    """Attention that finds the entry before, whatever stands there, and adds a little of its state's successor: the
    first mask has no state of its own, and steps on from there."""
    turn = 10000.0 ** (-np.arange(4) / 4)
    query = 200 * np.concatenate([np.cos(turn), -np.sin(turn)])  # turned back by one place
    key = np.concatenate([np.ones(4), np.zeros(4)])
    w = {}
    for part, vector in (("q", query), ("k", key)):  # any token's normed embedding adds up to s
        rows = np.repeat(np.tile(vector, 4)[:, None] / s, SIZE, axis=1)
        w[f"midlayer.self_attn.{part}_proj.weight"] = np.concatenate([rows, 0 * rows], axis=1).astype(np.float32)
    one = np.eye(SIZE, dtype=np.float32)
    w["midlayer.self_attn.v_proj.weight"] = np.concatenate([0 * one, one], axis=1)
    return w | {"midlayer.self_attn.o_proj.weight": (0.1 / s * follow).astype(np.float32)}


@pytest.mark.parametrize(
    "name", heavy_but(("eagle", "eagle3", "medusa", "p_eagle", "dspark"), lambda name: name == "eagle3")
)
def test_a_head_that_knows_is_kept_in_full_and_recovers(tmp_path, name):
    K = 2 if name == "p_eagle" else MOST  # one layer looks one place back
    folder, config, layer, follow = write_permutation(tmp_path / "target")
    write_knowing_head(tmp_path / "head", name, config, layer, follow)
    with open_checkpoint(folder) as checkpoint:
        model, family = checkpoint.config, family_of(checkpoint.config.family)
        specs = family.specs(model, np.float32)
        weights = load(checkpoint.reader, specs, family.name_table(model, checkpoint.source))
        with open_head(name, tmp_path / "head", checkpoint) as head:
            draft = load_head(head, model, weights, jnp.float32)
    num_rows, page = 5, 8
    num_pages = num_rows * 128 // page
    options = {"num_tokens": K, "max_model_len": 128, "sample_method": "greedy"}
    shared = {
        "target_logits": lambda weights, hidden: family.logits(weights, model, hidden),
        "vocab_size": SIZE,
    }
    if name == "medusa":
        inner = medusa(head.config, **shared, **options)
    else:
        shared |= {"pool_shape": pool_shape(head.config.model, num_pages, page), "pool_dtype": jnp.float32}
        make = dflash if name == "dspark" else functools.partial(eagle, eagle_head.HEAD)
        inner = make(head.config, hidden_size=SIZE, **shared, **options)
    proposer = wrong_every(EVERY, inner, lambda weights: {"target": weights["target"], "draft": draft}, SIZE)
    engine = make_engine(
        folder, custom(K), proposer=proposer, max_model_len=128, max_num_seqs=num_rows, block_size=page,
        num_pages=num_pages,
    )  # fmt: skip
    # The last token follows the one before, as a head that goes by states supposes.
    prompts = [[3], *([*start, int(NEXT[start[-1]])] for start in ([1], [5, 1], list(range(16)), [4] * 32))]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        token, said = prompt[-1], []
        for _ in range(NUM_TOKENS):
            token = int(NEXT[token])
            said.append(token)
        assert output.outputs[0].token_ids == said
        # A prompt of one token has shown the head no state yet, which a Markov head alone does not miss.
        first_is_plain = len(prompt) == 1 and name != "dspark"
        wanted = expected_histogram(
            NUM_TOKENS, K, EVERY, first_is_plain=first_is_plain, drafts_all_or_none=name == "dspark"
        )
        assert output.metrics.speculative_decoding["acceptance_histogram"] == wanted


def test_the_streams_can_be_said(tmp_path, target):
    """What the user says goes before what the config does; streams that the target has not are refused."""
    head_folders.write_eagle(tmp_path / "head", "eagle3", streams=(0, 1))
    config = {"model": str(tmp_path / "head"), "num_speculative_tokens": 1}
    for ids, words in (([0, 7], r"\[0, 7\] must lie in 0..2"), ([2], "does not read 1 streams")):
        with pytest.raises(ConfigError, match=words):
            make_engine(target, config | {"eagle_aux_hidden_state_layer_ids": ids})


def test_more_drafts_than_a_head_can_make_are_refused(tmp_path, target):
    head_folders.write_medusa(tmp_path / "medusa", num_heads=2)
    with pytest.raises(ConfigError, match="num_speculative_tokens=3 "):
        make_engine(target, {"model": str(tmp_path / "medusa"), "num_speculative_tokens": 3})
    mimo = head_folders.write_mimo(tmp_path / "mimo", num_modules=2)
    for said in (2, 1):  # by the config, or by the files, which win
        edit_config(mimo, num_nextn_predict_layers=said)
        with pytest.raises(ConfigError, match=r"num_speculative_tokens=3 must be divisible by .*2"):
            make_engine(mimo, {"method": "mtp", "num_speculative_tokens": 3})


@pytest.mark.heavy
def test_a_draft_limit_ends_drafting_for_its_row_alone(tmp_path, target, target_oracle):
    """T14: prompts on either side of the head's limit, one of them to the target's own."""
    limit = 16
    head_folders.write_eagle(tmp_path / "head", "eagle3", seed=3, max_position_embeddings=limit)
    engine = make_engine(target, {"model": str(tmp_path / "head"), "num_speculative_tokens": 3})
    requests = [
        (list(range(length)), SamplingParams(temperature=0, max_tokens=most, ignore_eos=True))
        for length, most in ((8, 12), (15, 6), (16, 6), (17, 6), (31, MAX_MODEL_LEN - 31))
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    outputs = engine.generate(prompts, [params for _, params in requests], use_tqdm=False)
    for output, (prompt, params) in zip(outputs, requests, strict=True):
        assert_says(output.outputs[0].token_ids, answer_of(target_oracle, prompt, params))
        drafted = sum(output.metrics.speculative_decoding["acceptance_histogram"])
        assert (drafted > 0) == (len(prompt) < limit)
