"""Host. A checkpoint read straight to a mesh: every stretch once, for the device that holds it."""

import math

import numpy as np
import pytest

from jaxspec.distributed import Split, make_mesh
from jaxspec.models.registry import family_of
from jaxspec.types import Int8Weight
from jaxspec.weights.checkpoint import open_checkpoint
from jaxspec.weights.int8 import Int8Put, quantize
from jaxspec.weights.laid_out import on_mesh, place_on_mesh
from jaxspec.weights.load import flatten, load
from tests.oracle.folders import TINY, write_llama


class Counting:
    """A reader that notes how many values each read was for."""

    def __init__(self, reader):
        self._reader, self.reads = reader, []

    @property
    def tensors(self):
        return self._reader.tensors

    def read(self, name, dtype=None, index=None):
        found = self._reader.read(name, dtype, index)
        self.reads.append((name, found.size))
        return found

    def release(self, name):
        self._reader.release(name)


def opened(folder, n, by_expert=False):
    with open_checkpoint(folder) as checkpoint:
        config, family = checkpoint.config, family_of(checkpoint.config.family)
        reader, mesh, split = Counting(checkpoint.reader), make_mesh(n), Split(config, n, by_expert)
        specs, table = family.specs(config, np.float32), family.name_table(config, checkpoint.source)
        return load(reader, specs, table, put=on_mesh(mesh, split.layout)), reader, specs, split


@pytest.mark.parametrize(
    ("name", "n", "by_expert"),
    [("llama-bias", 2, False), ("mixtral", 4, True), ("qwen3-moe-mixed", 2, False), ("gpt2", 2, False)],
)
def test_what_is_read_is_what_a_device_holds(name, n, by_expert):
    weights, reader, specs, split = opened(TINY / name, n, by_expert)
    flat = dict(flatten(specs))
    size = {name: math.prod(info.shape) for name, info in reader.tensors.items()}
    read = dict.fromkeys(size, 0)
    for tensor, count in reader.reads:
        read[tensor] += count
    repeats = n // split.config.num_kv_heads if n > split.config.num_kv_heads else 1
    for tensor, count in read.items():
        assert count in (0, size[tensor], repeats * size[tensor]), f"{tensor} read {count} of {size[tensor]}"
    for path, leaf in flatten_arrays(weights):
        layout = split.layout(flat[path])
        pieces = [shard.data for shard in leaf.addressable_shards]
        assert len(pieces) == n
        held = math.prod(layout.shape) // (n if layout.axis is not None else 1)
        assert {piece.size for piece in pieces} == {held}
    largest = max(math.prod(spec.shape) for spec in flat.values())
    assert max(count for _, count in reader.reads) <= largest // n


def flatten_arrays(tree, prefix=""):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        yield prefix, tree
        return
    for key, child in items:
        yield from flatten_arrays(child, f"{prefix}.{key}" if prefix else str(key))


def test_integers_have_the_scales_of_whole_rows(tmp_path):
    """A row that is split has one scale, found over all of it."""
    folder, n = write_llama(tmp_path, seed=2, num_heads=9, num_kv_heads=3), 2
    with open_checkpoint(folder) as checkpoint:
        config, family = checkpoint.config, family_of(checkpoint.config.family)
        mesh, split = make_mesh(n), Split(checkpoint.config, n)
        specs, table = family.specs(config, np.float32), family.name_table(config, checkpoint.source)
        whole = load(checkpoint.reader, specs, table)
        int8 = Int8Put(
            specs,
            family.int8_names,
            "float32",
            put=on_mesh(mesh, split.layout),
            place=place_on_mesh(mesh, split.layout),
        )
        found = load(checkpoint.reader, int8.specs, table, put=int8)
    for name in ("qkv", "o", "gate_up", "down"):
        spec = specs["layers"][1][name]
        values_oi, scale_o = quantize(np.asarray(whole["layers"][1][name]))
        layout, one = split.layout(spec), found["layers"][1][name]
        assert isinstance(one, Int8Weight)
        kept = [
            at for own in layout.stretches for start, end, zeros in own for at in [*range(start, end), *[-1] * zeros]
        ]
        wanted = np.where(np.array(kept) >= 0, np.take(values_oi, kept, axis=layout.axis).swapaxes(layout.axis, -1), 0)
        np.testing.assert_array_equal(np.asarray(one.values_oi), wanted.swapaxes(layout.axis, -1))
        scales = scale_o if layout.axis == 1 else np.where(np.array(kept) >= 0, scale_o[kept], 0)
        np.testing.assert_array_equal(np.asarray(one.scale_o), scales)
