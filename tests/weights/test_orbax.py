"""Host. Orbax folders: what is written is what is read, by us and by Orbax alone."""

import json

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxspec.errors import WeightsError
from jaxspec.weights.orbax import OrbaxReader, write_index, write_orbax_shard

ARRAYS = {
    "model.embed.weight": np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.bfloat16),
    "norm": np.linspace(0, 1, 5, dtype=np.float32),
    "ids": np.arange(-3, 3).reshape(2, 3),
    "mask": np.array([True, False]),
    "scalar": np.array(2.5, np.float16),
}


@pytest.fixture
def folder(tmp_path):
    weight_map = {}
    for index, names in enumerate((list(ARRAYS)[:2], list(ARRAYS)[2:])):
        write_orbax_shard(tmp_path / f"orbax-{index}", {name: ARRAYS[name] for name in names})
        weight_map |= dict.fromkeys(names, f"orbax-{index}")
    write_index(tmp_path, weight_map)
    return tmp_path


def test_round_trip(folder):
    with OrbaxReader(folder) as reader:
        assert {name: (info.shape, info.dtype) for name, info in reader.tensors.items()} == {
            name: (array.shape, array.dtype) for name, array in ARRAYS.items()
        }
        for name, array in ARRAYS.items():
            found = reader.read(name)
            assert (found.shape, found.dtype) == (array.shape, array.dtype)
            np.testing.assert_array_equal(found, array)
        cast = reader.read("norm", np.dtype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(cast, ARRAYS["norm"].astype(ml_dtypes.bfloat16))
        with pytest.raises(WeightsError, match="no tensor 'absent'"):
            reader.read("absent")
    with pytest.raises(WeightsError, match="closed"):
        reader.read("norm")


def test_orbax_reads_a_shard_without_us(folder):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(folder / "orbax-0")
    np.testing.assert_array_equal(tree["norm"], ARRAYS["norm"])


def test_what_is_missing_or_wrong(folder):
    index = folder / "orbax.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    for changed, words in (
        ({"norm": "orbax-1"}, "contradicts"),
        ({"more": "orbax-1"}, "contradicts"),
        ({"norm": "orbax-7"}, "lacks shards"),
        ({"norm": "../x"}, "plain file names"),
    ):
        write_index(folder, weight_map | changed)
        with pytest.raises(WeightsError, match=words):
            OrbaxReader(folder)
    write_index(folder, weight_map)
    (folder / "orbax-1" / "_METADATA").unlink()
    with pytest.raises(WeightsError, match="orbax-1: its metadata cannot be read"):
        OrbaxReader(folder)
