"""Host. The GGUF reader: every stored type against values worked out bit by bit here, and damaged files."""

import struct

import gguf
import ml_dtypes
import numpy as np
import pytest

import jaxspec.weights.gguf as reader_module
from jaxspec.errors import JaxspecError, WeightsError
from jaxspec.weights.checkpoint import main_dtype
from jaxspec.weights.gguf import GgufReader

BLOCK = 32  # values in a block of Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0


def half(raw):
    return struct.unpack("<e", raw)[0]


def nibbles(raw):
    """16 bytes hold 32 values: the low halves first, then the high halves."""
    return [byte & 15 for byte in raw] + [byte >> 4 for byte in raw]


# The layouts as ggml defines them, one block at a time. Independent of gguf.quants and of jaxspec.
def q4_0(raw):
    return [(value - 8) * half(raw[:2]) for value in nibbles(raw[2:18])]


def q4_1(raw):
    return [value * half(raw[:2]) + half(raw[2:4]) for value in nibbles(raw[4:20])]


def q5_1(raw):
    (high,) = struct.unpack("<I", raw[4:8])
    low = nibbles(raw[8:24])
    return [(low[i] | ((high >> i & 1) << 4)) * half(raw[:2]) + half(raw[2:4]) for i in range(BLOCK)]


def q8_0(raw):
    return [value * half(raw[:2]) for value in struct.unpack("<32b", raw[2:34])]


QUANTISED = {"Q4_0": (q4_0, 18, 1), "Q4_1": (q4_1, 20, 2), "Q5_1": (q5_1, 24, 2), "Q8_0": (q8_0, 34, 1)}


def random_blocks(rng, num_blocks, block_bytes, num_halves):
    """Random payloads behind sane scales (a random half may be NaN)."""
    raw = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    scales = rng.normal(size=(num_blocks, num_halves)).astype("<f2")
    raw[:, : 2 * num_halves] = scales.view(np.uint8).reshape(num_blocks, -1)
    return raw


def write(path, tensors, metadata=()):
    """tensors: {name: array, or (raw bytes [rows, row bytes], type name)}."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in dict(metadata).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.UINT32)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=gguf.GGMLQuantizationType[value[1]])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("shape", [(32,), (1, 32), (7, 96), (2, 3, 64)])
def test_quantised_types(tmp_path, kind, shape):
    unpack, block_bytes, num_halves = QUANTISED[kind]
    raw = random_blocks(np.random.default_rng(3), int(np.prod(shape)) // BLOCK, block_bytes, num_halves)
    expected = np.array([unpack(block.tobytes()) for block in raw], np.float64).reshape(shape)
    path = write(tmp_path / "x.gguf", {"x": (raw.reshape(*shape[:-1], -1), kind)})
    with GgufReader(path) as reader:
        assert (reader.tensors["x"].shape, reader.tensors["x"].dtype) == (shape, np.float32)
        values = reader.read("x")
        assert (values.shape, values.dtype) == (shape, np.float32)
        np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)


NOT_DEQUANTISED = {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0"}


@pytest.mark.parametrize("kind", [t.name for t in gguf.GGMLQuantizationType if t.name not in NOT_DEQUANTISED])
def test_every_type_the_package_dequantises(tmp_path, kind):
    """All of them, a row block at a time and in threads, beside the package on the whole tensor."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(5).integers(0, 256, (3, 5, 2 * block_bytes), dtype=np.uint8)
    raw &= 0x7B  # so that no half among them is infinite or NaN, wherever a type keeps its scales
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    with GgufReader(write(tmp_path / "x.gguf", {"x": (raw, kind)})) as reader:
        found = reader.read("x")
    assert found.shape == wanted.shape == (3, 5, 2 * block_values)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("block_values", [1, 64, 100, 1000])
def test_row_blocks_join_seamlessly(tmp_path, monkeypatch, block_values):
    monkeypatch.setattr(reader_module, "BLOCK_VALUES", block_values)
    raw = random_blocks(np.random.default_rng(4), 11 * 2, 20, 2)
    expected = np.array([q4_1(block.tobytes()) for block in raw]).reshape(11, 64)
    with GgufReader(write(tmp_path / "x.gguf", {"x": (raw.reshape(11, -1), "Q4_1")})) as reader:
        np.testing.assert_allclose(reader.read("x"), expected, rtol=1e-6, atol=1e-6)


def test_a_cast_rounds_once(tmp_path):
    raw = random_blocks(np.random.default_rng(5), 64, 34, 1)
    with GgufReader(write(tmp_path / "x.gguf", {"x": (raw.reshape(16, -1), "Q8_0")})) as reader:
        narrow = reader.read("x", np.dtype(ml_dtypes.bfloat16))
        assert narrow.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(narrow, reader.read("x").astype(ml_dtypes.bfloat16))


def test_types_that_are_not_quantised(tmp_path):
    rng = np.random.default_rng(6)
    f32 = rng.normal(size=(3, 5)).astype(np.float32)
    bf16 = f32.astype(ml_dtypes.bfloat16)
    arrays = {
        "f32": f32,
        "f16": f32.astype(np.float16),
        "bf16": (bf16.view(np.uint8).reshape(3, 10), "BF16"),
        "f64": f32.astype(np.float64),
        "i32": np.arange(6, dtype=np.int32).reshape(2, 3),
    }
    expected = arrays | {"bf16": bf16}
    with GgufReader(write(tmp_path / "x.gguf", arrays)) as reader:
        for name, array in expected.items():
            assert (reader.tensors[name].shape, reader.tensors[name].dtype) == (array.shape, array.dtype), name
            values = reader.read(name)
            np.testing.assert_array_equal(values, array)
            assert not values.flags.owndata, name


def test_a_type_only_gguf_knows(tmp_path):
    """K-quants and the rest go through the gguf package, whose whole-tensor result is the reference here."""
    rng = np.random.default_rng(7)
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q6_K]
    raw = rng.integers(0, 256, (4, block_bytes), dtype=np.uint8)
    raw[:, -2:] = np.full((4, 1), 0.01, "<f2").view(np.uint8)
    with GgufReader(write(tmp_path / "x.gguf", {"x": (raw, "Q6_K")})) as reader:
        assert reader.tensors["x"].shape == (4, block_values)
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q6_K)
        np.testing.assert_array_equal(reader.read("x"), expected)


def test_published_file(smollm2_path):
    """Spot rows of the real file, unpacked by hand from its bytes."""
    with GgufReader(smollm2_path) as reader:
        assert len(reader.tensors) == 272
        for name, kind in (("blk.7.ffn_down.weight", "Q4_1"), ("token_embd.weight", "Q8_0")):
            unpack, block_bytes, _ = QUANTISED[kind]
            values, columns = reader.read(name), reader.tensors[name].shape[1]
            row_bytes = columns // BLOCK * block_bytes
            for row in (0, 1, len(values) - 1):
                with smollm2_path.open("rb") as file:
                    file.seek(reader._entries[name].offset + row * row_bytes)
                    raw = file.read(row_bytes)
                expected = [unpack(raw[i : i + block_bytes]) for i in range(0, row_bytes, block_bytes)]
                np.testing.assert_allclose(values[row], np.ravel(expected), rtol=1e-6, atol=1e-6)


def test_metadata_unknown_names_and_closed_readers(tmp_path):
    reader = GgufReader(write(tmp_path / "x.gguf", {"x": np.ones(3, np.float32)}, {"llama.block_count": 4}))
    assert reader.metadata["llama.block_count"] == 4
    with pytest.raises(WeightsError, match="no tensor 'nope'"):
        reader.read("nope")
    reader.close()
    with pytest.raises(WeightsError, match="closed"):
        reader.read("x")


def test_every_truncation_is_an_error(tmp_path):
    raw = random_blocks(np.random.default_rng(8), 4, 20, 2).reshape(2, -1)
    path = write(tmp_path / "x.gguf", {"a": np.ones(7, np.float32), "x": (raw, "Q4_1")})
    whole = path.read_bytes()
    with GgufReader(path) as reader:
        end = reader._entries["x"].offset + raw.size
    for length in range(end):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsError):
            GgufReader(path)


def test_no_damage_escapes_as_another_error(tmp_path):
    raw = random_blocks(np.random.default_rng(9), 4, 34, 1).reshape(2, -1)
    path = write(tmp_path / "x.gguf", {"a": np.ones(7, np.float32), "x": (raw, "Q8_0")}, {"k": 1})
    whole = path.read_bytes()
    for position in range(len(whole) - raw.size - 8):
        for value in (b"\xff" * 8, struct.pack("<Q", 2**61), struct.pack("<Q", 64), bytes(8)):
            path.write_bytes(whole[:position] + value + whole[position + 8 :])
            try:
                with GgufReader(path) as reader:
                    for name in reader.tensors:
                        reader.read(name)
            except JaxspecError:
                pass


def raw_file(path, tensors, data_bytes=4096):
    """A head written by hand: tensors are (name, dims in ggml order, type, offset)."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 0)
    for name, dims, kind, offset in tensors:
        head += struct.pack("<Q", len(name)) + name.encode()
        head += struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(data_bytes))
    return path


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([("x", [4], 0, 2**40)], ["'x'", "ends at"]),
        ([("x", [2**45], 0, 0)], ["'x'", "ends at"]),
        ([("x", [2**32, 2**32], 0, 0)], ["'x'", str(2**32)]),
        ([("x", [2**39, 2**39, 0], 0, 0)], ["'x'", str(2**39)]),
        ([("x", [2000], 0, 0)], ["'x'", "ends at"]),
        ([("x", [16], 0, 0), ("y", [16], 0, 32)], ["'x'", "'y'", "overlap"]),
        ([("x", [16], 0, 0), ("y", [16], 0, 0)], ["overlap"]),
        ([("x", [33], 8, 0)], ["'x'", "multiples of 32", "Q8_0", "[33]"]),
        ([("x", [4], 99, 0)], ["'x'", "unknown type 99"]),
        ([("x", [256], 15, 0)], ["'x'", "Q8_K", "dequantiser"]),
    ],
)  # fmt: skip
def test_absurd_tables_are_named(tmp_path, tensors, words):
    with pytest.raises(WeightsError) as caught:
        GgufReader(raw_file(tmp_path / "bad.gguf", tensors))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_part_of_a_split_file_is_called_so(tmp_path):
    tensors = {"x": np.ones((2, 3), np.float32)}
    with GgufReader(write(tmp_path / "whole.gguf", tensors, {"split.count": 1})) as reader:
        assert set(reader.tensors) == {"x"}
    with pytest.raises(WeightsError, match=r"one of 3 parts .* gguf-split --merge"):
        GgufReader(write(tmp_path / "part.gguf", tensors, {"split.count": 3}))


def test_empty_tensors_are_read(tmp_path):
    with GgufReader(raw_file(tmp_path / "x.gguf", [("x", [32, 0], 8, 0), ("y", [4, 0], 0, 0)])) as reader:
        assert reader.read("x").shape == (0, 32)
        assert reader.read("y").shape == (0, 4)


def test_a_file_is_quantised_when_most_of_its_values_are(tmp_path):
    raw = random_blocks(np.random.default_rng(7), 64, 34, 1).reshape(16, -1)  # 16 x 128 values as Q8_0
    norm = np.ones(128, np.float32)
    with GgufReader(write(tmp_path / "q.gguf", {"x": (raw, "Q8_0"), "norm": norm})) as reader:
        assert main_dtype(reader) == "bfloat16"
        assert {name: info.is_quantized for name, info in reader.tensors.items()} == {"x": True, "norm": False}
    with GgufReader(write(tmp_path / "f.gguf", {"x": (raw, "Q8_0"), "y": np.ones((17, 128), np.float32)})) as reader:
        assert main_dtype(reader) == "float32"
