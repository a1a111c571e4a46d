"""Host. What each device gets of every array: whole heads and features, all of them once, zeros where it has none."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxspec.config.model import ModelConfig, MoeConfig
from jaxspec.distributed import Split, make_mesh
from jaxspec.errors import ConfigError
from jaxspec.models.attention import attention_specs
from jaxspec.models.layers import mlp_specs
from jaxspec.models.moe import moe_specs
from jaxspec.types import ArraySpec
from jaxspec.weights.laid_out import place_on_mesh
from tests.oracle.folders import TARGETS, TINY

H, D, F = 2, 6, 10


def config_of(num_heads, num_kv_heads, **more):
    return ModelConfig(
        family="llama", model_type="llama", vocab_size=8, hidden_size=D, intermediate_size=F, num_layers=1,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=H, max_position_embeddings=16, norm_eps=1e-5,
        rope=None, sliding_window_layers=(None,), **more,
    )  # fmt: skip


def on_devices(split, spec, array):
    """What each device holds, in order."""
    placed = place_on_mesh(Mesh(np.array(jax.devices()[: split.num_devices]), ("tensor",)), split.layout)(spec, array)
    return [np.asarray(shard.data) for shard in sorted(placed.addressable_shards, key=lambda shard: shard.device.id)]


def numbered(spec):
    return np.arange(1, 1 + math.prod(spec.shape), dtype=np.float32).reshape(spec.shape)


# devices -> the query heads and key heads of each, None for one of zeros: written out, not computed.
HEADS = {
    (8, 4, 2): [([0, 1, 2, 3], [0, 1]), ([4, 5, 6, 7], [2, 3])],
    (8, 4, 4): [([0, 1], [0]), ([2, 3], [1]), ([4, 5], [2]), ([6, 7], [3])],
    (8, 4, 8): [([0], [0]), ([1], [0]), ([2], [1]), ([3], [1]), ([4], [2]), ([5], [2]), ([6], [3]), ([7], [3])],
    (9, 3, 3): [([0, 1, 2], [0]), ([3, 4, 5], [1]), ([6, 7, 8], [2])],
    (9, 3, 2): [([0, 1, 2, 3, 4, 5], [0, 1]), ([6, 7, 8, None, None, None], [2, None])],
    (4, 4, 3): [([0, 1], [0, 1]), ([2, 3], [2, 3]), ([None, None], [None, None])],
}


@pytest.mark.parametrize("case", HEADS)
def test_every_device_has_its_own_heads_one_behind_the_other(case):
    num_heads, num_kv_heads, n = case
    split = Split(config_of(num_heads, num_kv_heads, qkv_bias=True), n)
    specs = attention_specs(split.config, np.float32)
    qkv, o, bias = (numbered(specs[name]) for name in ("qkv", "o", "qkv_bias"))
    first_k, first_v = num_heads, num_heads + num_kv_heads

    def rows(array, heads):
        zeros = np.zeros((H, *array.shape[1:]), np.float32)
        return np.concatenate([zeros if at is None else array[at * H : (at + 1) * H] for at in heads])

    def moved(heads, by):
        return [None if at is None else at + by for at in heads]

    for at, (own_q, own_k) in enumerate(HEADS[case]):
        order = [*own_q, *moved(own_k, first_k), *moved(own_k, first_v)]
        np.testing.assert_array_equal(on_devices(split, specs["qkv"], qkv)[at], rows(qkv, order))
        np.testing.assert_array_equal(on_devices(split, specs["qkv_bias"], bias)[at], rows(bias, order))
        np.testing.assert_array_equal(on_devices(split, specs["o"], o)[at], rows(o.T, own_q).T)
    assert split.cache_heads == 2 * sum(len(own_k) for _, own_k in HEADS[case])


def test_gate_and_up_lie_side_by_side_on_every_device():
    split, specs = Split(config_of(8, 4), 4), mlp_specs(D, F, np.float32, with_bias=False)
    gate_up, down = numbered(specs["gate_up"]), numbered(specs["down"])
    found = zip(on_devices(split, specs["gate_up"], gate_up), on_devices(split, specs["down"], down), strict=True)
    for at, (own, own_down) in enumerate(found):  # 3 features each, of 10: the last has one, and two of zeros
        features = [feature for feature in range(3 * at, 3 * at + 3) if feature < F]
        zeros = np.zeros((3 - len(features), D), np.float32)
        wanted = np.concatenate([gate_up[features], zeros, gate_up[[F + one for one in features]], zeros])
        np.testing.assert_array_equal(own, wanted)
        np.testing.assert_array_equal(own_down, np.concatenate([down[:, features], zeros.T], axis=1))


@pytest.mark.parametrize("by_expert", [False, True])
def test_experts_are_split_by_width_or_by_number(by_expert):
    moe = MoeConfig(layers=(True,), num_experts=6, num_experts_per_token=2, intermediate_size=8)
    split = Split(config_of(8, 4, moe=moe), 4, by_expert)
    specs = moe_specs(D, moe, np.float32)
    for name, width_axis in (("experts_gate", 2), ("experts_down", 1)):
        whole = numbered(specs[name])
        own = on_devices(split, specs[name], whole)
        if by_expert:  # two each, the last device's are zeros
            np.testing.assert_array_equal(np.concatenate(own), np.concatenate([whole, np.zeros_like(whole[:2])]))
        else:
            np.testing.assert_array_equal(np.concatenate(own, axis=width_axis), whole)
        assert len(own) == 4
    router = numbered(specs["router"])
    assert all((one == router).all() for one in on_devices(split, specs["router"], router))


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_large_parameter_of_every_family_is_split(name, n):
    from jaxspec.models.registry import family_of
    from jaxspec.weights.checkpoint import open_checkpoint

    with open_checkpoint(TINY / name) as checkpoint:
        config = checkpoint.config
    split = Split(config, n)
    for spec in jax.tree.leaves(
        family_of(config.family).specs(config, np.float32), is_leaf=lambda leaf: isinstance(leaf, ArraySpec)
    ):
        layout = split.layout(spec)
        whole = {"latent", "position", "choice"} & set(spec.axes)  # small, or read in whole by every head
        is_split = n > 1 and ({"heads", "ffn", "vocab", "expert_ffn"} & set(spec.axes))
        assert (layout.spec != PartitionSpec()) == bool(is_split), spec
        assert is_split or n == 1 or whole or len(spec.shape) == 1, spec


@pytest.mark.parametrize(
    ("heads", "n", "by_expert", "says"),
    [
        ((8, 4), 16, False, "must not exceed the model's 8 attention heads; take 8 or fewer"),
        ((12, 4), 8, False, "is more than the model's 4 key heads"),
        ((9, 3), 4, False, "take 3 or fewer"),
        ((8, 4), 8, True, "must not exceed the 6 experts with enable_expert_parallel"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(heads, n, by_expert, says):
    moe = MoeConfig(layers=(True,), num_experts=6, num_experts_per_token=2, intermediate_size=8)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={n}") as caught:
        Split(config_of(*heads, moe=moe), n, by_expert).check()
    assert says in str(caught.value)


def test_a_mesh_takes_the_devices_that_there_are():
    assert make_mesh(1) is None
    mesh = make_mesh(4)
    assert mesh is not None
    assert list(mesh.devices) == jax.devices()[:4]
    with pytest.raises(ConfigError, match="tensor_parallel_size=9 must not exceed the 8 cpu devices"):
        make_mesh(9)
