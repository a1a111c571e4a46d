"""Host. Reading parts: what a slice of a parameter holds, in every form, and that no more is read for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.models.registry import family_of
from jaxspec.types import ArraySpec
from jaxspec.weights.checkpoint import open_checkpoint
from jaxspec.weights.fp8 import Float8Reader
from jaxspec.weights.gguf import GgufReader
from jaxspec.weights.load import load, sharded
from jaxspec.weights.names import NameTable, TensorSource
from jaxspec.weights.orbax import OrbaxReader, write_index, write_orbax_shard
from jaxspec.weights.safetensors import SafetensorsReader
from jaxspec.weights.torch_zip import TorchReader
from jaxspec.weights.transforms import Axes, Flat, HeadRows, PlusOne, RowOrder
from tests.oracle.folders import TINY
from tests.weights import zips
from tests.weights.test_load import MemoryReader

ROOT = Path(__file__).resolve().parents[2]
RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((24, 512)).astype(np.float32)
STACK = RNG.standard_normal((3, 4, 64)).astype(np.float32)


def write_safetensors(folder, arrays):
    names = {"float32": "F32", "float8_e4m3fn": "F8_E4M3"}
    header, data = {}, b""
    for name, array in arrays.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": names[array.dtype.name], "shape": array.shape, "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def of_safetensors(folder):
    return SafetensorsReader(write_safetensors(folder, {"m": MATRIX, "s": STACK}))


def of_torch(folder):
    storage = zips.storage(key="0", num_values=MATRIX.size)
    tensors = {"m": zips.tensor(storage, shape=MATRIX.T.shape, strides=(1, MATRIX.shape[1]))}  # a transposed view
    zips.write(folder, zips.pack(zips.state(**tensors), {"data/0": MATRIX.tobytes()}))
    return TorchReader(folder)


def of_gguf(kind):
    def make(folder):
        writer = gguf.GGUFWriter(folder / "x.gguf", "llama")
        for name, array in (("m", MATRIX), ("s", STACK if kind != "Q4_K" else MATRIX.reshape(2, 12, 512))):
            raw = gguf.quants.quantize(array, gguf.GGMLQuantizationType["Q8_0"]) if kind == "Q8_0" else array
            if kind == "Q4_K":  # which the package can read and not write: any bytes but not-a-number scales will do
                raw = RNG.integers(0, 60, (*array.shape[:-1], array.shape[-1] // 256 * 144)).astype(np.uint8)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind] if kind != "F32" else None)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return GgufReader(folder / "x.gguf")

    return make


def of_orbax(folder):
    write_orbax_shard(folder / "orbax-0", {"m": MATRIX, "s": STACK})
    write_index(folder, {"m": "orbax-0", "s": "orbax-0"})
    return OrbaxReader(folder)


def of_float8(scale_shape):
    def make(folder):
        scale = RNG.uniform(0.5, 2, scale_shape).astype(np.float32)
        values = MATRIX.astype(ml_dtypes.float8_e4m3fn)
        return Float8Reader(SafetensorsReader(write_safetensors(folder, {"m": values, "m_scale": scale})), (10, 100))

    return make


FORMS = {
    "safetensors": of_safetensors, "torch": of_torch, "gguf F32": of_gguf("F32"), "gguf Q8_0": of_gguf("Q8_0"),
    "gguf Q4_K": of_gguf("Q4_K"), "orbax": of_orbax, "float8 by block": of_float8((3, 6)),
    "float8 by row": of_float8((24, 1)), "float8 by tensor": of_float8((1,)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_part_is_that_part_of_the_whole(form, tmp_path):
    rng = np.random.default_rng(1)
    with FORMS[form](tmp_path) as reader:
        for name, info in reader.tensors.items():
            whole = np.array(reader.read(name))
            parts = [[sorted(rng.integers(0, size + 1, 2)) for size in info.shape] for _ in range(12)]
            parts += [[(0, size) for size in info.shape], [(1, size) for size in info.shape]]
            for part in parts:
                index = tuple(slice(int(start), int(stop)) for start, stop in part)
                found = reader.read(name, None, index)
                np.testing.assert_array_equal(found, whole[index])
                cast = reader.read(name, np.dtype(ml_dtypes.bfloat16), index)
                np.testing.assert_array_equal(cast, whole[index].astype(ml_dtypes.bfloat16))


def pairs(rows):
    return rows.reshape(2, 4, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


TURNS = {
    "axes": (Axes((1, 0)), (6, 4)),
    "experts": (Axes((0, 2, 1)), (3, 4, 5)),
    "an expert alone": (Axes((0, 2, 1), is_lone=True), (4, 5)),
    "rows": (RowOrder(pairs), (16, 3)),
    "rows of a vector": (RowOrder(pairs), (16,)),
    "plus one": (PlusOne(), (7,)),
    "flat": (Flat(), (1, 7)),
    "rows of heads": (HeadRows(5, slice(2, 5)), (20, 3)),
    "rows of heads, turned": (HeadRows(5, slice(0, 2), is_turned=True), (20, 3)),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_turn_in_part_is_that_part_of_the_turn_and_it_can_be_undone(name):
    turn, shape = TURNS[name]
    tensor = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1
    whole, fetched = turn(tensor), []

    def fetch(index):
        fetched.append(tensor if index is None else tensor[index])
        return fetched[-1]

    rng = np.random.default_rng(2)
    for _ in range(20):
        index = tuple(slice(*sorted(map(int, rng.integers(0, size + 1, 2)))) for size in whole.shape)
        np.testing.assert_array_equal(turn.part(fetch, index, shape), whole[index])
    back = turn.inverse(whole)
    assert back.shape == shape
    np.testing.assert_array_equal(turn(back), whole)
    np.testing.assert_array_equal(back[back != 0], tensor[back != 0])
    if isinstance(turn, HeadRows):
        others = [turn.inverse(whole), HeadRows(5, slice(2, 5) if turn.is_turned else slice(0, 2)).inverse(
            HeadRows(5, slice(2, 5) if turn.is_turned else slice(0, 2))(tensor))]  # fmt: skip
        np.testing.assert_array_equal(sum(others), tensor)
    else:
        np.testing.assert_array_equal(back, tensor)
    if name == "rows":  # whole heads in, whole heads out
        fetched.clear()
        turn.part(fetch, (slice(8, 16), slice(0, 3)), shape)
        assert [array.shape for array in fetched] == [(8, 3)]


class CountingReader(MemoryReader):
    """Notes the bytes of every read."""

    def read(self, name, dtype=None, index=None):
        array = super().read(name, None, index)
        self.bytes_read = [*getattr(self, "bytes_read", []), array.nbytes]
        return array if dtype is None else array.astype(dtype)


def test_each_device_costs_its_shard_and_no_more():
    """Eight devices: joined parts, a transform, axes that some devices share and a parameter that all do."""
    rng = np.random.default_rng(3)
    arrays = {name: rng.standard_normal((16, 32)).astype(np.float32) for name in ("q", "k", "v", "turned")}
    arrays["norm"] = rng.standard_normal(32).astype(np.float32)
    shapes = {"qkv": (48, 32), "turned": (32, 16), "norm": (32,)}
    specs = {name: ArraySpec(shape, np.float32, ("x",) * len(shape)) for name, shape in shapes.items()}
    sources = {name: TensorSource((name,)) for name in ("norm", "turned")} | {"qkv": TensorSource(("q", "k", "v"))}
    sources["turned"] = TensorSource(("turned",), (Axes((1, 0)),))
    wanted = load(MemoryReader(arrays), specs, NameTable(sources))
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def load_as(**placed):
        reader = CountingReader(arrays)
        shardings = {name: NamedSharding(mesh, PartitionSpec(*placed[name])) for name in specs}
        found = load(reader, specs, NameTable(sources), put=sharded(lambda parameter: shardings[parameter.path]))
        for name, array in found.items():
            assert array.sharding == shardings[name]
            np.testing.assert_array_equal(array, wanted[name])
        # Every byte once, though several devices hold some of them.
        assert sum(reader.bytes_read) == sum(array.nbytes for array in arrays.values())
        by_name = {}
        for name, num_bytes in zip(reader.reads, reader.bytes_read, strict=True):
            by_name.setdefault(name, []).append(num_bytes)
        return by_name

    whole, vector = 16 * 32 * 4, 32 * 4
    found = load_as(qkv=(None, ("x", "y")), turned=(("x", "y"),), norm=("x",))
    assert found == {name: [whole // 8] * 8 for name in ("q", "k", "v", "turned")} | {"norm": [vector // 4] * 4}
    # Twelve rows of 48 a shard: the second has the last four of q and the first eight of k.
    found = load_as(qkv=("x",), turned=("x", "y"), norm=())
    assert found["q"] == [whole * 12 // 16, whole * 4 // 16]
    assert found["k"] == [whole * 8 // 16, whole * 8 // 16]
    assert (found["turned"], found["norm"]) == ([whole // 8] * 8, [vector])


@pytest.mark.parametrize("name", ["ernie4-5-moe", "gpt2", "mixtral", "deepseek-v3-mtp", "gemma2"])
def test_families_load_in_shards_as_they_load_whole(name):
    """Each axis in turn over two devices, so that every transform of the name tables is cut."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def sharding_of(parameter):
        axes = [axis for axis, size in enumerate(parameter.spec.shape) if size % 2 == 0]
        axis = axes[len(parameter.path) % len(axes)]
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "x"))

    with open_checkpoint(TINY / name) as checkpoint:
        family = family_of(checkpoint.config.family)
        specs, table = family.specs(checkpoint.config, np.float32), family.name_table(checkpoint.config, "hf")
        whole = load(checkpoint.reader, specs, table, put=lambda parameter: parameter.read())
        parts = load(checkpoint.reader, specs, table, put=sharded(sharding_of))
    jax.tree.map(np.testing.assert_array_equal, parts, whole)


ROWS, COLUMNS = 8192, 4096  # 128 MiB in float32
READ = f"""
import sys, numpy as np
from pathlib import Path
from jaxspec.types import ArraySpec
from jaxspec.weights.checkpoint import open_tensors
from jaxspec.weights.gguf import GgufReader
from jaxspec.weights.load import load
from jaxspec.weights.names import NameTable, TensorSource
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
def run(path, rows):
    specs = {{"w": ArraySpec(({ROWS}, {COLUMNS}), np.float32, ("a", "b"))}}
    with GgufReader(path) if path.is_file() else open_tensors(path) as reader:
        put = lambda parameter: float(parameter.read((slice(0, rows), slice(None))).sum())
        load(reader, specs, NameTable({{"w": TensorSource(("w",))}}), put=put)
for path in map(Path, sys.argv[1:]):
    run(path, 8)  # what the libraries themselves need
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start = peak()
    run(path, {ROWS} // 8)
    print(peak() - start)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_an_eighth_of_a_tensor_costs_the_memory_of_an_eighth(tmp_path):
    """From safetensors, GGUF and Orbax, in one process one after the other."""
    num_bytes = 4 * ROWS * COLUMNS
    folders = [tmp_path / form for form in ("safetensors", "gguf", "orbax")]
    for folder in folders:
        folder.mkdir()
    text = json.dumps({"w": {"dtype": "F32", "shape": [ROWS, COLUMNS], "data_offsets": [0, num_bytes]}}).encode()
    with (folders[0] / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + num_bytes)
    writer = gguf.GGUFWriter(folders[1] / "x.gguf", "llama")
    raw = np.zeros((ROWS, COLUMNS // 32 * 34), np.uint8)
    writer.add_tensor("w", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_orbax_shard(folders[2] / "orbax-0", {"w": np.zeros((ROWS, COLUMNS), np.float32)})
    write_index(folders[2], {"w": "orbax-0"})
    done = subprocess.run(
        [sys.executable, "-c", READ, str(folders[0]), str(folders[1] / "x.gguf"), str(folders[2])],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    shares = [int(rise) / num_bytes for rise in done.stdout.split()]
    assert len(shares) == 3
    assert max(shares) < 3 / 8, shares
