"""Device. Every family on a mesh says what transformers recorded: heads, widths, experts and vocabulary split, with
sizes that divide and sizes that do not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.cache.pages import new_pool, pool_shape, slots_of
from jaxspec.distributed import Split, make_mesh
from jaxspec.models.base import Tokens
from jaxspec.models.registry import family_of
from jaxspec.step.spread import specs_of
from jaxspec.weights.checkpoint import open_checkpoint
from jaxspec.weights.laid_out import on_mesh
from jaxspec.weights.load import load
from tests.contracts.members import FAMILY_MEMBERS
from tests.oracle.folders import TARGETS, TINY
from tests.oracle.goldens import assert_close, read_golden
from tests.quick import heavy_but

# (folder, devices, whole experts a device). Two key heads on four devices are repeated; four heads on three, and
# vocabularies and widths that three do not divide, are filled up.
CASES = [
    *((name, 2, False) for name in FAMILY_MEMBERS),
    *((name, 4, False) for name in ("llama-bias", "qwen3", "gemma2", "deepseek-v3-plain", "mistral-swa")),
    *((name, 3, False) for name in ("phi3-plain", "gpt2", "deepseek-v3-mtp")),
    *((name, 2, True) for name in ("qwen3-moe-mixed", "mixtral", "deepseek-v3-mtp", "glm4-moe-mtp")),
    ("ernie4-5-moe", 4, True),
]
QUICK = [
    ("llama-bias", 4, False),
    ("phi3-plain", 3, False),
    ("qwen3-moe-mixed", 2, True),
    ("deepseek-v3-mtp", 3, False),
]
PAGE = 4


@pytest.mark.parametrize("case", heavy_but(CASES, lambda case: case in QUICK))
def test_logits_are_the_recorded_ones(case):
    name, n, by_expert = case
    expected = read_golden(name)
    ids_BT = expected["input_ids"].astype(np.int32)
    B, T = ids_BT.shape
    mesh = make_mesh(n)
    assert mesh is not None
    with open_checkpoint(TINY / name) as checkpoint:
        config, family = checkpoint.config, family_of(checkpoint.config.family)
        split = Split(config, n, by_expert)
        specs, table = family.specs(config, np.float32), family.name_table(config, checkpoint.source)
        weights = load(checkpoint.reader, specs, table, put=on_mesh(mesh, split.layout))
    num_pages = -(-T // PAGE)
    pages_BM = np.arange(B * num_pages, dtype=np.int32).reshape(B, num_pages)[::-1].copy()
    positions_BT = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)).copy()
    shape = pool_shape(config, B * num_pages, PAGE, num_heads=split.cache_heads)
    pool = jax.device_put(new_pool(shape, jnp.float32) * jnp.nan, NamedSharding(mesh, split.pool_spec))

    def run(weights, pool, ids_BT):
        slots_BT = slots_of(jnp.asarray(positions_BT), jnp.asarray(pages_BM), PAGE)
        tokens = Tokens(ids_BT, jnp.asarray(positions_BT), slots_BT, jnp.asarray(pages_BM))
        hidden_BTD, pool = family.forward(weights, config, tokens, pool)
        return hidden_BTD, family.logits(weights, config, hidden_BTD), pool

    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(specs_of(weights), split.pool_spec, PartitionSpec()),
        out_specs=(PartitionSpec(), PartitionSpec(None, None, "tensor"), split.pool_spec),
    )
    hidden_BTD, logits_BTV, _ = jax.jit(mapped)(weights, pool, ids_BT)
    assert_close(np.asarray(hidden_BTD), expected["final_hidden"])
    V = config.vocab_size
    assert_close(np.asarray(logits_BTV)[..., :V], expected["logits"])
    assert (np.asarray(logits_BTV)[..., V:] == -np.inf).all()


def test_every_family_is_among_the_cases():
    @functools.cache
    def family(name):
        with open_checkpoint(TINY / name) as checkpoint:
            return checkpoint.config.family

    assert {family(name) for name in TARGETS} == {family(name) for name, *_ in CASES}
