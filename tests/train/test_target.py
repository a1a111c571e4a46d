"""Device. The frozen target without pages says what transformers recorded: full, sliding, capped, latent attention.
What it sees of a corpus is kept, and read again."""

import jax
import numpy as np
import pytest

from jaxspec.train import seen as seen_module
from jaxspec.train.batches import pack
from jaxspec.train.data.shards import read_corpus
from jaxspec.train.seen import see_corpus
from jaxspec.train.target import open_target
from tests.oracle.folders import TINY
from tests.oracle.goldens import assert_close, read_golden
from tests.train.conftest import VOCAB


@pytest.mark.parametrize("name", ["mistral-swa", "gemma2", "deepseek-v3-plain"])
def test_it_says_what_was_recorded(name):
    expected = read_golden(name)
    target, weights = open_target(str(TINY / name), "float32")
    streams = (0, target.config.num_layers)

    @jax.jit
    def run(weights, ids):
        hidden, streams_BTX = target.see(weights, ids, streams)
        return hidden, streams_BTX, target.logits(weights, hidden)

    hidden, streams_BTX, logits = run(weights, expected["input_ids"])
    assert_close(hidden, expected["final_hidden"])
    assert_close(logits, expected["logits"])
    assert streams_BTX.shape[-1] == 2 * target.config.hidden_size


@pytest.mark.parametrize("streams", [(), (1, 3)])
def test_what_it_sees_of_a_corpus_is_kept(target_folder, corpus_folder, tmp_path, monkeypatch, streams):
    """Beside a pass over each conversation alone; a file that is lost is made again, the others are not."""
    monkeypatch.setattr(seen_module, "_PART", 10)
    target, weights = open_target(str(target_folder), "float32")
    corpus = read_corpus(corpus_folder, VOCAB)
    seen = see_corpus(tmp_path, target, weights, corpus, streams, dtype=np.float32)
    batch = pack(corpus, seen, np.arange(len(corpus)), (1, len(corpus), 14))
    for index in (0, 9, 10, 23):
        ids = corpus[index].token_ids
        hidden, aux = target.see(weights, ids[None], streams)
        best = np.argmax(target.logits(weights, hidden), axis=-1)[0]
        row = jax.tree.map(lambda x, index=index: x[0, index], batch)
        np.testing.assert_allclose(row.hidden_BTD[: len(ids)], hidden[0], atol=1e-4)
        np.testing.assert_allclose(row.streams_BTX[: len(ids)], aux[0], atol=1e-4)
        assert row.best_BT[: len(ids)].tolist() == best.tolist()

    files = sorted(tmp_path.rglob("*.npy"))
    assert len(files) == 3
    shapes = jax.eval_shape(lambda: weights)  # none to compute with: nothing is looked at
    again = see_corpus(tmp_path, target, shapes, corpus, streams, dtype=np.float32)
    assert all((a == b).all() for a, b in zip(seen.parts, again.parts, strict=True))
    files[1].unlink()
    times = [files[0].stat().st_mtime_ns, files[2].stat().st_mtime_ns]
    mended = see_corpus(tmp_path, target, weights, corpus, streams, dtype=np.float32)
    assert (mended.parts[1] == seen.parts[1]).all()
    assert [files[0].stat().st_mtime_ns, files[2].stat().st_mtime_ns] == times
    rounded = see_corpus(tmp_path, target, weights, corpus, streams)
    half = pack(corpus, rounded, np.arange(3), (1, 3, 14))
    assert half.hidden_BTD.dtype == jax.numpy.bfloat16
    np.testing.assert_allclose(half.hidden_BTD.astype(np.float32)[0], batch.hidden_BTD[0, :3], rtol=2**-7, atol=1e-3)
