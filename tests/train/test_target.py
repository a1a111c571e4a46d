"""Device. The frozen target without pages says what transformers recorded: full, sliding, capped, latent attention."""

import jax
import pytest

from jaxspec.train.target import open_target
from tests.oracle.folders import TINY
from tests.oracle.goldens import assert_close, read_golden


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
