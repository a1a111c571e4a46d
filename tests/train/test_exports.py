"""Device. What trainers export is read by jaxspec's own loaders to the weights that were trained; in the engine it
changes no greedy answer, and a drafter that has learned its target is mostly right."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.models.heads.load import load_head, open_head
from jaxspec.models.registry import family_of
from jaxspec.train import TrainConfig, train
from jaxspec.train.batches import pack, split
from jaxspec.train.config import HEADS as METHODS
from jaxspec.train.data.shards import Record, read_corpus, write_shard
from jaxspec.train.run import make_trainer
from jaxspec.train.seen import see_corpus
from jaxspec.train.target import open_target
from jaxspec.weights.checkpoint import open_checkpoint
from jaxspec.weights.load import load
from tests.lossless.engines import make_engine
from tests.oracle.llama import NumpyLlama, assert_says, continuation
from tests.train.conftest import HEADS, VOCAB

CASES = [
    ("eagle3", HEADS["eagle3"]),
    ("eagle3", {"aux_streams": [1, 2], "layout": "speculators", "num_steps": 2}),
    ("eagle3", {"aux_streams": [3], "draft_vocab_size": 9, "intermediate_size": 12, "rope_theta": 500.0}),
    ("dflash", HEADS["dflash"]),
    ("dflash", {"aux_streams": [0, 2, 3], "intermediate_size": 12, "mask_token_id": 5}),
    ("medusa", HEADS["medusa"]),
    ("draft_model", HEADS["draft_model"]),
    ("eagle", HEADS["eagle"]),
    ("eagle", {"intermediate_size": 12, "rope_theta": 500.0}),
    ("mlp_speculator", HEADS["mlp_speculator"]),
    ("mlp_speculator", {"num_steps": 3, "tie_weights": True}),
]


@pytest.mark.parametrize(("method", "head"), CASES)
def test_what_is_exported_is_read_back(method, head, recipe, tmp_path):
    config = TrainConfig(**recipe, method=method, head=head)
    target, weights = open_target(config.model, "float32")
    corpus = read_corpus(Path(config.data), VOCAB)
    records = split(corpus, 4, None, 16).train
    trainer = make_trainer(config, target, weights, corpus, records)
    seen = see_corpus(tmp_path / "seen", target, weights, corpus, trainer.aux_streams)
    params = trainer.init(jax.tree.map(lambda x: x[0], pack(corpus, seen, records, (1, len(records), 16))))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), params)
    trainer.export(params, tmp_path / "drafter")
    with open_checkpoint(config.model) as checkpoint:
        if method == "draft_model":
            with open_checkpoint(tmp_path / "drafter") as draft:
                assert draft.config.num_layers == 2
                family = family_of(draft.config.family)
                found = load(draft.reader, family.specs(draft.config, jnp.float32),
                             family.name_table(draft.config, "hf"))  # fmt: skip
        else:
            with open_head(method, tmp_path / "drafter", checkpoint) as opened:
                found = load_head(opened, checkpoint.config, weights, jnp.float32)
    if method in ("eagle3", "dflash"):
        ids = trainer.frozen["target_ids_V"]
        assert (ids is None) == ("target_ids" not in found)
        assert ids is None or found.pop("target_ids").tolist() == ids.tolist()
    if method in ("eagle", "eagle3", "dflash"):
        assert found.pop("embed") is weights["embed"]
    assert jax.tree.structure(found) == jax.tree.structure(params)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, params))


PROMPTS = [[3, 14, 15], [9, 2, 6, 5]]
LENGTH = 14


@pytest.fixture(scope="module")
def answers(target_folder, tmp_path_factory):
    """(the target's greedy answers to PROMPTS by numpy, a folder of shards that hold them over and over)."""
    model = NumpyLlama(target_folder)
    found = [continuation(model, prompt, LENGTH) for prompt in PROMPTS]
    records = [
        Record(np.array([*prompt, *answer.token_ids], np.int32), len(prompt), "chat")
        for prompt, answer in zip(PROMPTS, found, strict=True)
    ]
    folder = tmp_path_factory.mktemp("answers")
    write_shard(folder / "tokens-00000.npz", records * 6, vocab_size=VOCAB, about={})
    return found, folder


@pytest.mark.heavy
@pytest.mark.parametrize("method", list(METHODS))
def test_a_drafter_that_learned_its_target_s_answers_drafts_them(method, target_folder, answers, tmp_path):
    """Greedy answers are the target's own, whoever drafts; acceptance in the engine is what training had measured."""
    wanted, data = answers
    head = HEADS[method] | ({"draft_vocab_size": 31} if method in ("eagle3", "dflash") else {})
    config = TrainConfig(
        model=str(target_folder), data=str(data), output=str(tmp_path / "run"), method=method, head=head, num_steps=250,
        batch_size=8, max_length=20, warmup_steps=5, learning_rate=0.01, clip_norm=5.0, held_out=4, eval_every=250,
        save_every=250, log_every=50, engine_eval_prompts=0,
    )  # fmt: skip
    report = train(config, show_progress=False)
    kept = report["held_out"]["kept"]
    assert kept[0] > 0.8, report
    assert kept[-1] > 0.5, report
    num = {"medusa": 2, "mlp_speculator": 2}.get(method, 3)
    draft = {"method": method, "model": str(tmp_path / "run" / "drafter"), "num_speculative_tokens": num}
    engine = make_engine(target_folder, draft)
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    for output, answer in zip(outputs, wanted, strict=True):
        assert_says(output.outputs[0].token_ids, answer)
        assert output.metrics.speculative_decoding["num_rounds"] <= 0.65 * LENGTH
