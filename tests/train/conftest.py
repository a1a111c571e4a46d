"""Host. A tiny target, and conversations to train on."""

import numpy as np
import pytest

from jaxspec.train.data.shards import KINDS, Record, write_shard
from tests.oracle.folders import write_llama

VOCAB = 32


def some_records(num: int, seed: int = 0, longest: int = 14) -> list[Record]:
    """Random tokens, but for the last id, which stands for a mask where there are masks."""
    rng = np.random.default_rng(seed)
    return [
        Record(
            token_ids=rng.integers(VOCAB - 1, size=int(rng.integers(8, longest + 1))).astype(np.int32),
            num_prompt=int(rng.integers(1, 5)),
            kind=KINDS[i % len(KINDS)],
        )
        for i in range(num)
    ]


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("target"), seed=3, num_layers=3, max_position_embeddings=128)


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for shard in range(2):
        write_shard(folder / f"tokens-{shard:05}.npz", some_records(12, shard), vocab_size=VOCAB, about={})
    return folder


@pytest.fixture
def recipe(target_folder, corpus_folder, tmp_path):
    """Keys of a run of four steps."""
    return {
        "model": str(target_folder),
        "data": str(corpus_folder),
        "output": str(tmp_path / "run"),
        "num_steps": 4,
        "batch_size": 4,
        "max_length": 16,
        "warmup_steps": 1,
        "learning_rate": 0.01,
        "held_out": 4,
        "eval_every": 4,
        "save_every": 2,
        "engine_eval_prompts": 0,
    }


HEADS = {
    "eagle3": {
        "aux_streams": [0, 1, 2],
        "draft_vocab_size": 20,
        "num_steps": 3,
        "start": "random",
        "fc_norm": True,
        "num_kv_heads": 4,
    },
    "dflash": {"aux_streams": [1, 2], "draft_vocab_size": 20, "block_size": 4, "anchor_stride": 2, "num_layers": 2},
    "medusa": {"num_heads": 2, "num_blocks": 2},
    "draft_model": {"num_layers": 2},
    "eagle": {"num_steps": 3, "num_layers": 2},
    "mlp_speculator": {"num_steps": 2, "inner_size": 12, "scale_input": True},
}
