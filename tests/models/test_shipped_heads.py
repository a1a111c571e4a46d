"""Device. The drafters that come with the package say what float64 numpy says of their files."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.shipped import FOLDER, SHIPPED
from jaxspec.models.chains import new_chains
from jaxspec.models.heads import eagle
from jaxspec.models.heads.base import head_logits
from jaxspec.models.heads.load import load_head, open_head
from jaxspec.train.target import load_target, whole_rows
from jaxspec.weights.aliases import resolve_model
from jaxspec.weights.checkpoint import open_checkpoint
from tests.oracle.heads import NumpyEagle

TARGETS = [target for target, drafters in SHIPPED.items() if "eagle3" in drafters and "/" not in target]


@pytest.mark.heavy
@pytest.mark.parametrize("target", TARGETS)
def test_eagle3(target):
    folder = FOLDER / SHIPPED[target]["eagle3"].folder
    with open_checkpoint(resolve_model(target)) as checkpoint, open_head("eagle3", folder, checkpoint) as opened:
        frozen, target_weights = load_target(checkpoint, "float32")
        weights, config = load_head(opened, frozen.config, target_weights, jnp.float32), opened.config
    rng = np.random.default_rng(0)
    T, width = 7, frozen.config.hidden_size * len(config.aux_streams)
    streams_TX = 10 * rng.standard_normal((T, width)).astype(np.float32)
    token_ids_T = rng.integers(frozen.config.vocab_size, size=T).astype(np.int32)

    @jax.jit
    def run(weights, streams_BTX, token_ids_BT):
        features_BTD = eagle.features(weights, config, streams_BTX)
        hidden, state, _ = eagle.forward(
            weights, config, whole_rows(token_ids_BT), features_BTD, new_chains(config.model.num_layers)
        )
        return head_logits(weights["head"], hidden, config.logit_scale)[0], state[0]

    logits, states = run(weights, streams_TX[None], token_ids_T[None])
    embed = np.asarray(target_weights["embed"], np.float64)
    oracle = NumpyEagle(folder, SimpleNamespace(weights={"model.embed_tokens.weight": embed}), "eagle3")
    oracle.weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in oracle.weights.items()}
    features = np.array([oracle.feature(row) for row in streams_TX.astype(np.float64)])
    wanted_logits, wanted_states = oracle.run(features, token_ids_T)
    np.testing.assert_allclose(logits, wanted_logits, atol=1e-4 * np.abs(wanted_logits).max())
    np.testing.assert_allclose(states, wanted_states, atol=1e-4 * np.abs(wanted_states).max())
    assert [oracle.target_id(i) for i in range(len(weights["target_ids"]))] == weights["target_ids"].tolist()
