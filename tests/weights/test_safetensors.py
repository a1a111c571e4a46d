"""Host. The safetensors reader against the safetensors package, hand-built bytes, and damage of every kind."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.errors import JaxspecError, WeightsError
from jaxspec.weights.safetensors import SafetensorsReader


def pack(header, data=b""):
    """Bytes of a safetensors file, whatever the header says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.normal(size=(5, 3)).astype(np.float32),
        "b.half": rng.normal(size=(7,)).astype(np.float16),
        "c.ids": np.arange(-3, 3, dtype=np.int64).reshape(2, 3),
        "d.mask": np.array([True, False, True]),
        "e.scalar": np.array(2.5),
        "f.empty": np.zeros((0, 4), np.float32),
    }


def test_reads_what_the_package_writes(tmp_path, arrays):
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "np"})
    with SafetensorsReader(tmp_path) as reader:
        assert set(reader.tensors) == set(arrays)
        for name, expected in arrays.items():
            assert (reader.tensors[name].shape, reader.tensors[name].dtype) == (expected.shape, expected.dtype)
            np.testing.assert_array_equal(reader.read(name), expected)


def test_a_read_is_a_view_and_a_cast_is_not(tmp_path, arrays):
    save_file(arrays, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path / "model.safetensors") as reader:
        view = reader.read("a.weight")
        assert not view.flags.owndata
        assert not view.flags.writeable
        cast = reader.read("a.weight", np.dtype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(cast, arrays["a.weight"].astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(view, arrays["a.weight"])  # still valid after close


@pytest.mark.parametrize(
    ("name", "raw", "expected"),
    [
        ("BF16", struct.pack("<4H", 0x3F80, 0xC000, 0x3E99, 0x7F80), [1.0, -2.0, 0.298828125, np.inf]),
        ("F8_E4M3", bytes([0x38, 0xC0, 0x01, 0x7E]), [1.0, -2.0, 2.0**-9, 448.0]),
        ("F8_E5M2", bytes([0x3C, 0xC0, 0x01, 0x7B]), [1.0, -2.0, 2.0**-16, 57344.0]),
        ("U16", struct.pack("<4H", 0, 1, 256, 65535), [0, 1, 256, 65535]),
    ],
)
def test_bit_patterns(tmp_path, name, raw, expected):
    """At an odd offset, so that values lie unaligned in the file."""
    header = {"pad": entry("U8", [1], 0, 1), "x": entry(name, [2, 2], 1, 1 + len(raw))}
    (tmp_path / "model.safetensors").write_bytes(pack(header, b"\x07" + raw))
    with SafetensorsReader(tmp_path) as reader:
        np.testing.assert_array_equal(reader.read("x").astype(np.float64).ravel(), expected)


@pytest.fixture
def sharded(tmp_path, arrays):
    """A folder of two shards and an index; returns a function that rewrites the index."""
    names = list(arrays)
    files = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, members in files.items():
        save_file({name: arrays[name] for name in members}, tmp_path / file)
    weight_map = {name: file for file, members in files.items() for name in members}

    def write_index(changes=()):
        merged = {key: value for key, value in (weight_map | dict(changes)).items() if value is not ...}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": merged}))
        return tmp_path

    write_index()
    return write_index


def test_shards(sharded, arrays):
    with SafetensorsReader(sharded()) as reader:
        for name, expected in arrays.items():
            np.testing.assert_array_equal(reader.read(name), expected)


def test_golden_shards(tiny_goldens):
    with SafetensorsReader(tiny_goldens / "mistral-swa") as reader:
        index = json.loads((tiny_goldens / "mistral-swa" / "model.safetensors.index.json").read_text())
        assert set(reader.tensors) == set(index["weight_map"])
        assert reader.tensors["lm_head.weight"].shape == (128, 48)


def test_missing_shard(sharded):
    folder = sharded()
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"lacks shards .* model-00002-of-00002\.safetensors"):
        SafetensorsReader(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ghost": "model-00001-of-00002.safetensors"}, ["'ghost'", "model-00001-of-00002.safetensors"]),
        ({"a.weight": ...}, ["'a.weight'", "model-00001-of-00002.safetensors"]),
        ({"a.weight": "model-00002-of-00002.safetensors"}, ["'a.weight'", "is in model-00001-of-00002"]),
        ({"a.weight": "../model-00001-of-00002.safetensors"}, ["plain file names"]),
        ({"a.weight": "/etc/passwd"}, ["plain file names"]),
        ({"a.weight": ".."}, ["plain file names"]),
        ({"a.weight": 3}, ["plain file names"]),
    ],
)
def test_index_contradicts_the_shards(sharded, changes, words):
    with pytest.raises(WeightsError) as caught:
        SafetensorsReader(sharded(changes))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map"', "[" * 100_000])
def test_index_is_not_an_index(sharded, text):
    folder = sharded()
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match=r"index\.json"):
        SafetensorsReader(folder)


def test_one_name_in_two_shards(sharded, arrays):
    folder = sharded({"a.weight": "model-00001-of-00002.safetensors"})
    save_file(
        {name: arrays[name] for name in ("a.weight", "d.mask", "e.scalar", "f.empty")},
        folder / "model-00002-of-00002.safetensors",
    )
    with pytest.raises(WeightsError, match=r"'a\.weight' is in both model-00001.* and model-00002"):
        SafetensorsReader(folder)


def test_folders_without_a_clear_answer(tmp_path, arrays):
    with pytest.raises(WeightsError, match="no safetensors weights"):
        SafetensorsReader(tmp_path)
    save_file(arrays, tmp_path / "one.safetensors")
    assert set(SafetensorsReader(tmp_path).tensors) == set(arrays)
    save_file(arrays, tmp_path / "two.safetensors")
    with pytest.raises(WeightsError, match="2 safetensors files"):
        SafetensorsReader(tmp_path)


def test_unknown_names_and_closed_readers(tmp_path, arrays):
    save_file(arrays, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    with pytest.raises(WeightsError, match="no tensor 'nope'"):
        reader.read("nope")
    reader.close()
    with pytest.raises(WeightsError, match="closed"):
        reader.read("a.weight")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["0"]),
        (b"\x01\x02", ["header"]),
        (struct.pack("<Q", 2**63), [str(2**63)]),
        (struct.pack("<Q", 20) + b"{}", ["20 bytes"]),
        (pack(b"not json"), ["JSON"]),
        (pack(b"\xff\xfe\x00"), ["JSON"]),
        (pack(b"[1, 2]"), ["object"]),
        (pack(b"[" * 50_000), ["JSON"]),
        (pack(b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
              b"\0"), ["'x'", "twice"]),
        (pack({"x": 3}), ["'x'", "dtype, shape and data_offsets"]),
        (pack({"x": {"dtype": "F32", "shape": [1]}}, b"\0" * 4), ["'x'", "data_offsets"]),
        (pack({"x": entry("F4_E2M1", [1], 0, 1)}, b"\0"), ["'x'", "F4_E2M1", "BF16"]),
        (pack({"x": entry(["F32"], [1], 0, 4)}, b"\0" * 4), ["'x'", "F32"]),
        (pack({"x": entry("F32", [-1], 0, 4)}, b"\0" * 4), ["'x'", "-1"]),
        (pack({"x": entry("F32", [1.5], 0, 4)}, b"\0" * 4), ["'x'", "1.5"]),
        (pack({"x": entry("F32", [True], 0, 4)}, b"\0" * 4), ["'x'", "True"]),
        (pack({"x": entry("F32", "1", 0, 4)}, b"\0" * 4), ["'x'"]),
        (pack({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2, 4]}}, b"\0" * 4), ["'x'", "[0, 2, 4]"]),
        (pack({"x": entry("F32", [1], 4, 0)}, b"\0" * 4), ["'x'", "[4, 0]"]),
        (pack({"x": entry("F32", [1], -4, 0)}, b"\0" * 4), ["'x'", "-4"]),
        (pack({"x": entry("F32", [2], 0, 8)}, b"\0" * 4), ["'x'", "[0, 8]", "4 data bytes"]),
        (pack({"x": entry("F32", [2**62], 0, 2**64)}, b"\0" * 4), ["'x'"]),
        (pack({"x": entry("F32", [2**39, 2**39, 0], 0, 0)}), ["'x'", str(2**39)]),
        (pack({"x": entry("F32", [2**31, 2**31], 0, 4)}, b"\0" * 4), ["'x'", str(2**31)]),
        (pack({"x": entry("F32", [1] * 40, 0, 4)}, b"\0" * 4), ["'x'", "[1, 1, 1"]),
        (pack({"x": entry("F32", [2], 0, 4)}, b"\0" * 4), ["'x'", "cannot fill 4 bytes"]),
        (pack({"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 2, 6)}, b"\0" * 6), ["'y'", "overlaps", "'x'"]),
        (pack({"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 0, 4)}, b"\0" * 4), ["overlaps"]),
        (pack({"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 8, 12)}, b"\0" * 12), ["'y'", "gap"]),
        (pack({"x": entry("F32", [1], 0, 4)}, b"\0" * 9), ["5 bytes after the last tensor"]),
    ],
)  # fmt: skip
def test_damage_is_named(tmp_path, content, words):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        SafetensorsReader(tmp_path)
    assert all(word in str(caught.value) for word in [*words, str(path)]), str(caught.value)


def test_every_truncation_is_an_error(tmp_path, arrays):
    path = tmp_path / "model.safetensors"
    save_file(arrays, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsError):
            SafetensorsReader(tmp_path)


def test_no_damage_escapes_as_another_error(tmp_path, arrays):
    path = tmp_path / "model.safetensors"
    save_file(arrays, path)
    whole = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    rng = np.random.default_rng(1)
    num_errors = 0
    for position in range(header_end):
        for value in rng.integers(0, 256, 4, dtype=np.uint8):
            path.write_bytes(whole[:position] + bytes([value]) + whole[position + 1 :])
            try:
                SafetensorsReader(tmp_path).close()
            except JaxspecError:
                num_errors += 1
    assert num_errors > header_end
