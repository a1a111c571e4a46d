"""Host. Float8 weights and their scales, against a loop over single values."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest

from jaxspec.errors import ConfigError, WeightsError
from jaxspec.tools.convert import convert
from jaxspec.weights.checkpoint import open_checkpoint, open_tensors
from jaxspec.weights.fp8 import Float8Reader, weight_block
from tests.weights.test_load import MemoryReader

E4M3, E5M2, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16


def weight(*shape, dtype=E4M3):
    return np.random.default_rng(1).normal(size=shape).astype(dtype)


def scales(*shape, dtype=np.float32):
    return np.random.default_rng(2).uniform(0.5, 2, shape).astype(dtype)


def by_hand(values, scale, rows, columns):
    out = np.empty(values.shape, np.float32)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            out[i, j] = np.float32(values[i, j]) * np.float32(scale[i // rows, j // columns])
    return out


@pytest.mark.parametrize("shape", [(8, 12), (9, 10), (3, 2), (4, 13), (1, 1)])
def test_blocks(shape):
    values, scale = weight(*shape), scales(-(-shape[0] // 4), -(-shape[1] // 3))
    reader = Float8Reader(MemoryReader({"w": values, "w_scale_inv": scale, "norm": scales(3)}), (4, 3))
    assert {name: (info.shape, info.dtype.name) for name, info in reader.tensors.items()} == {
        "w": (shape, "float32"),
        "norm": ((3,), "float32"),
    }
    wanted = by_hand(values, scale, 4, 3)
    np.testing.assert_array_equal(reader.read("w"), wanted)
    np.testing.assert_array_equal(reader.read("w", np.dtype(BF16)), wanted.astype(BF16))
    np.testing.assert_array_equal(reader.read("norm"), scales(3))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1), (150,), (150, 1)])
def test_one_scale_or_one_a_row(scale_shape, dtype):
    values, scale = weight(150, 7, dtype=dtype), scales(*scale_shape, dtype=BF16)
    reader = Float8Reader(MemoryReader({"w": values, "w_scale": scale, "input_scale": scales(1)}))
    by_row = np.broadcast_to(scale.reshape(-1, 1), (150, 1))
    np.testing.assert_array_equal(reader.read("w"), by_hand(values, by_row, 1, 7))
    assert list(reader.tensors) == ["w"]  # the scale of activations means nothing here


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"w": weight(8, 8)}, ["w [8, 8]", "w_scale_inv"]),
        ({"w": weight(8, 8), "w_scale_inv": np.ones((2, 2), np.int32)}, ["needs a scale"]),
        ({"w": weight(8, 8), "w_scale_inv": scales(2, 3)}, ["w_scale_inv", "[2, 3]", "[8, 8]", "[4, 4]"]),
        ({"w": weight(8, 8), "w_scale_inv": scales(9)}, ["[9]"]),
        ({"w": weight(8), "w_scale_inv": scales(8)}, ["[8]"]),
    ],
)
def test_scales_that_do_not_fit(arrays, words):
    with pytest.raises(WeightsError) as caught:
        Float8Reader(MemoryReader(arrays), (4, 4))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_config_says_the_block():
    assert weight_block({"quant_method": "fp8", "weight_block_size": [64, 32]}) == (64, 32)
    assert weight_block({"quant_method": "fp8"}) == (128, 128)
    for wrong in ([128], [0, 1], "128", [1.5, 2], [True, 4]):
        with pytest.raises(ConfigError, match="weight_block_size"):
            weight_block({"quant_method": "fp8", "weight_block_size": wrong})
    with pytest.raises(ConfigError, match="gptq"):
        weight_block({"quant_method": "gptq"})


def pack(arrays):
    """A safetensors file by hand: the safetensors package writes no float8 from numpy."""
    names = {np.dtype(E4M3): "F8_E4M3", np.dtype(np.float32): "F32"}
    header, data = {}, b""
    for name, array in arrays.items():
        start = len(data)
        data += array.tobytes()
        header[name] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


DOWN = "model.layers.1.mlp.down_proj.weight"  # [48, 64]


@pytest.fixture
def folder(tiny_goldens, tmp_path):
    """The golden Llama with its layers' matrices as DeepSeek publishes its own, in blocks of 16 by 16."""
    folder = shutil.copytree(tiny_goldens / "llama", tmp_path / "llama")
    with open_tensors(folder) as reader:
        arrays = {name: np.array(reader.read(name)) for name in reader.tensors}
    for name in [name for name in arrays if ".mlp." in name or ".self_attn." in name]:
        arrays[name] = arrays[name].astype(E4M3)
        arrays[f"{name}_scale_inv"] = scales(*(-(-size // 16) for size in arrays[name].shape))
    (folder / "model.safetensors").write_bytes(pack(arrays))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, arrays[DOWN], arrays[f"{DOWN}_scale_inv"]


def test_a_folder(folder):
    path, values, scale = folder
    assert (values.shape, scale.shape) == ((48, 64), (3, 4))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.dtype == "bfloat16"
        np.testing.assert_array_equal(checkpoint.reader.read(DOWN), by_hand(values, scale, 16, 16))


def test_it_converts_to_a_full_folder(folder, tmp_path):
    path, values, scale = folder
    done = convert(str(path), tmp_path / "out")
    with open_checkpoint(tmp_path / "out") as checkpoint:
        found = checkpoint.reader.read(DOWN)
    assert found.dtype == BF16
    np.testing.assert_array_equal(found, by_hand(values, scale, 16, 16).astype(BF16))
    assert "quantization_config is dropped" in done.notes[0]


def test_a_config_that_says_fp8_of_a_folder_without_it(folder, tiny_goldens):
    shutil.copy(tiny_goldens / "llama" / "model.safetensors", folder[0])
    with pytest.raises(ConfigError, match="fp8"):
        open_checkpoint(folder[0])
