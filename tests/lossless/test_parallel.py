"""Device. Drafters that make all drafts in one pass, behind the engine: in every round each row's drafts are those of
an independent computation over the row's tokens, and no answer changes by them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.cache.pages import pool_shape
from jaxspec.models.registry import family_of
from jaxspec.proposers.draft_model import draft_model
from jaxspec.step import rounds
from jaxspec.weights.checkpoint import open_checkpoint
from tests.lossless.again import ask_again
from tests.lossless.engines import custom, make_engine
from tests.lossless.misled import expected_histogram, wrong_every
from tests.lossless.test_every_proposer import answer_of, make_requests
from tests.oracle import head_folders
from tests.oracle.folders import write_folder, write_like
from tests.oracle.head_folders import edit_config
from tests.oracle.llama import NumpyLlama, assert_says
from tests.oracle.parallel_heads import NumpyDflash, NumpyPard, NumpyPEagle
from tests.quick import heavy_but

MASK = 31


def write_pard(folder, target):
    return edit_config(write_like(folder, target, seed=1, noise=0.2), pard_token=MASK)


def write_p_eagle(folder, target):
    del target
    options = {"num_layers": 2, "draft_vocab_size": 20, "is_speculators": True, "stored": ("embed_tokens", "t2d")}
    return head_folders.write_eagle(folder, "eagle3", seed=3, mask_token_id=MASK, **options)


def write_dflash(folder, target):
    del target
    return head_folders.write_dflash(folder, seed=5, mask_token_id=MASK, num_layers=2)


def write_dspark(folder, target):
    del target
    return head_folders.write_dflash(folder, seed=4, mask_token_id=MASK, markov="vanilla", layout="nested")


# method: (K, how to write its folder, its twin from the folder and the target's oracle)
DRAFTERS = {
    "pard": (3, write_pard, lambda folder, target: NumpyPard(NumpyLlama(folder), MASK)),
    "p_eagle": (3, write_p_eagle, NumpyPEagle),
    "dflash": (2, write_dflash, NumpyDflash),
    "dspark": (3, write_dspark, NumpyDflash),
}


@pytest.mark.parametrize("method", heavy_but(DRAFTERS, lambda method: method == "dspark"))
def test_every_round_drafts_what_a_naive_computation_does(method, tmp_path, target, target_oracle):
    """Requests of many lengths that join and leave, greedy and sampled, one to the model's end; prompts come in chunks,
    and most drafts are rejected, so that masks and blocks left behind are overwritten again and again."""
    K, write, twin = DRAFTERS[method]
    oracle = twin(write(tmp_path / "draft", target), target_oracle)
    engine = make_engine(target, {"model": str(tmp_path / "draft"), "num_speculative_tokens": K}, rounds_per_batch=1)
    assert engine.config.speculative_config.method == method, "told by the files"
    seen = watch(engine)
    requests = make_requests(seed=K)
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    engine.core.scheduler.audit()
    for output, (prompt, params) in zip(outputs, requests, strict=True):
        assert_says(output.outputs[0].token_ids, answer_of(target_oracle, prompt, params))
    ask_again(engine, requests, outputs, [min(answer_of(target_oracle, *one).leads) > 1e-3 for one in requests])
    lengths = set()
    for ids, room, drafts in seen:
        logits = oracle.draft_logits(ids, K)
        wanted = oracle.drafts(ids, K)[:room] if method in ("pard", "p_eagle") or room >= K else []
        lengths.add(len(drafts))
        assert len(drafts) == len(wanted)
        for k, (draft, one) in enumerate(zip(drafts, wanted, strict=True)):
            first, second = np.sort(logits[k])[-2:][::-1]
            if first - second < 1e-3:  # a tie, behind which a Markov head may say anything
                break
            assert draft == one
    assert len(seen) > 100
    assert {0, K} <= lengths


def watch(engine):
    """A list that fills with (committed ids, room for drafts, drafts) of every row in every round to come."""
    parts, seen = engine.core.parts, []
    propose = jax.jit(functools.partial(rounds.propose, parts.proposer))
    decode_rounds = parts.programs.decode_rounds

    def look(weights, state, batch, num_rounds):
        assert num_rounds == 1
        drafts, _ = propose(weights, state, batch)
        found = map(np.asarray, (batch.rows_B, drafts.counts_B, state.history_RC, state.len_R, state.max_len_R))
        rows_B, counts_B, history_RC, len_R, max_len_R = found
        drafts_BK = np.asarray(drafts.token_ids_BK).tolist()
        for row, count, guesses in zip(rows_B.tolist(), counts_B.tolist(), drafts_BK, strict=True):
            if row < len(len_R) - 1:  # not the guard row
                length, room = int(len_R[row]), max(0, int(max_len_R[row] - len_R[row] - 1))
                seen.append((history_RC[row, :length].tolist(), room, guesses[:count]))
        return decode_rounds(weights, state, batch, num_rounds)

    parts.programs.decode_rounds = look
    return seen


SIZE, EVERY, NUM_TOKENS = 32, 7, 60
SAID = np.random.default_rng(0).integers(0, SIZE, 128)


def write_clock(folder):
    """T3: a GPT-2 that goes by positions alone: whatever the tokens are, after position p comes SAID[p]."""
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": SIZE, "n_embd": SIZE, "n_head": 4,
        "n_layer": 1, "n_positions": 128, "tie_word_embeddings": False,
    }  # fmt: skip
    one, none, ones = np.eye(SIZE, dtype=np.float32), np.zeros, np.ones(SIZE, np.float32)
    w = {"wte.weight": none((SIZE, SIZE)), "wpe.weight": one[SAID], "lm_head.weight": one}
    w |= {"ln_f.weight": ones, "ln_f.bias": 0 * ones}
    for norm in ("ln_1", "ln_2"):
        w |= {f"h.0.{norm}.weight": ones, f"h.0.{norm}.bias": 0 * ones}
    for part, wide in (("attn.c_attn", 3 * SIZE), ("attn.c_proj", SIZE), ("mlp.c_fc", 4 * SIZE)):
        w |= {f"h.0.{part}.weight": none((SIZE, wide)), f"h.0.{part}.bias": none(wide)}
    w |= {"h.0.mlp.c_proj.weight": none((4 * SIZE, SIZE)), "h.0.mlp.c_proj.bias": none(SIZE)}
    return write_folder(folder, config, {name: np.asarray(tensor, np.float32) for name, tensor in w.items()})


@pytest.mark.heavy
def test_a_model_that_knows_is_kept_in_full_and_recovers(tmp_path):
    """The target drafts for itself, with masks: every draft is right but for those made wrong on purpose."""
    K, num_rows, page = 4, 4, 8
    num_pages = num_rows * 128 // page
    folder = write_clock(tmp_path / "clock")
    with open_checkpoint(folder) as checkpoint:
        config, family = checkpoint.config, family_of(checkpoint.config.family)
    inner = draft_model(
        family, config.for_run(128), num_tokens=K, max_model_len=128, sample_method="greedy", mask_token_id=0,
        pool_shape=pool_shape(config, num_pages, page), pool_dtype=jnp.float32,
    )  # fmt: skip
    proposer = wrong_every(EVERY, inner, lambda weights: {"draft": weights["target"]}, SIZE)
    engine = make_engine(
        folder, custom(K), proposer=proposer, max_model_len=128, max_num_seqs=num_rows, block_size=page,
        num_pages=num_pages,
    )  # fmt: skip
    prompts = [[3], [5, 1], list(range(16)), [4] * 33]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == SAID[len(prompt) - 1 :][:NUM_TOKENS].tolist()
        histogram = output.metrics.speculative_decoding["acceptance_histogram"]
        assert histogram == expected_histogram(NUM_TOKENS, K, EVERY)
