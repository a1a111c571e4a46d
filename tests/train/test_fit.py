"""Device. EAGLE-3's beginning beside NumPy's own least squares."""

from pathlib import Path

import jax
import numpy as np

from jaxspec.train.batches import pack
from jaxspec.train.config import TrainConfig
from jaxspec.train.data.shards import read_corpus
from jaxspec.train.fit import _RIDGE
from jaxspec.train.run import make_trainer
from jaxspec.train.seen import see_corpus
from jaxspec.train.target import open_target
from tests.train.conftest import VOCAB


def normed(x):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)


def test_values_and_output_are_the_best_linear_guess_of_the_next_state(recipe, tmp_path):
    head = {"aux_streams": [0, 3], "fc_norm": True, "num_kv_heads": 4, "draft_vocab_size": 20}
    config = TrainConfig(**recipe, method="eagle3", head=head)
    target, weights = open_target(config.model, "float32")
    corpus = read_corpus(Path(config.data), VOCAB)
    records = np.arange(len(corpus))
    trainer = make_trainer(config, target, weights, corpus, records)
    seen = see_corpus(tmp_path, target, weights, corpus, trainer.aux_streams, dtype=np.float32)
    sample = jax.tree.map(lambda x: x[0], pack(corpus, seen, records, (1, len(records), 14)))
    params = jax.tree.map(np.asarray, trainer.init(sample))

    embed, norm = (np.asarray(weights[name], np.float64) for name in ("embed", "final_norm"))
    D = embed.shape[1]
    rows, wanted = [], []
    for i in records:
        ids = corpus[int(i)].token_ids
        state = sample.hidden_BTD[i, : len(ids)].astype(np.float64) / norm
        for t in range(len(ids) - 1):
            rows.append(np.concatenate([normed(embed[ids[t + 1]]), normed(state[t])]))
            wanted.append(state[t + 1] - state[t])
    rows, wanted = np.array(rows), np.array(wanted)
    ridge = np.sqrt(_RIDGE * (rows * rows).sum() / (2 * D)) * np.eye(2 * D)
    best, *_ = np.linalg.lstsq(np.concatenate([rows, ridge]), np.concatenate([wanted, np.zeros((2 * D, D))]))
    layer = params["layers"][0]
    np.testing.assert_allclose(layer["o"] @ layer["qkv"][-D:], best.T, atol=2e-3)
    assert params["fc"][:, -D:].tolist() == np.eye(D).tolist()
    assert not params["fc"][:, :-D].any()
    assert not layer["down"].any()
    sure = params["final_norm"] / norm
    assert 0 < sure.min() <= sure.max() <= 1.0001
    np.testing.assert_allclose(sure, sure[0], rtol=1e-5)
    ids = np.asarray(trainer.frozen["target_ids_V"])
    full = weights["embed"] if target.config.tie_word_embeddings else weights["head"]
    assert (params["head"] == np.asarray(full)[ids]).all()
