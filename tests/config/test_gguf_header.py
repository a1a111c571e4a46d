"""Host. The GGUF head parser against the gguf package's writer and reader, and against every kind of damage."""

import struct

import gguf
import numpy as np
import pytest

from jaxspec.config.gguf_header import read_gguf_header
from jaxspec.errors import WeightsError


@pytest.fixture
def sample(tmp_path):
    """A file with one key of each kind of value and two tensors."""
    path = tmp_path / "sample.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("t.u8", 250)
    writer.add_int8("t.i8", -7)
    writer.add_uint16("t.u16", 65000)
    writer.add_int16("t.i16", -300)
    writer.add_uint32("t.u32", 4_000_000_000)
    writer.add_int32("t.i32", -70000)
    writer.add_uint64("t.u64", 2**60)
    writer.add_int64("t.i64", -(2**60))
    writer.add_float32("t.f32", 0.1)
    writer.add_float64("t.f64", 0.1)
    writer.add_bool("t.yes", True)
    writer.add_bool("t.no", False)
    writer.add_string("t.text", "grüße 你好 😀")
    writer.add_array("t.strings", ["a", "", "Ġĉ", "😀"])
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.floats", [0.5, -1.5])
    writer.add_array("t.bools", [True, False, True])
    writer.add_tensor("matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("vector", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same_as_gguf_package(path):
    ours, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert {name: type(value) for name, value in ours.metadata.items()} == {
        name: type(value) for name, value in fields.items()
    }
    assert {name: (t.shape, t.ggml_type, t.offset) for name, t in ours.tensors.items()} == {
        t.name: (tuple(t.shape.tolist()[::-1]), int(t.tensor_type), t.data_offset) for t in theirs.tensors
    }
    assert ours.file_bytes == path.stat().st_size


def test_same_as_the_gguf_package(sample):
    assert_same_as_gguf_package(sample)


def test_same_as_the_gguf_package_on_a_published_file(smollm2_path):
    assert_same_as_gguf_package(smollm2_path)


def test_alignment_is_obeyed(tmp_path):
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    writer.add_tensor("a", np.ones(3, np.float32))
    writer.add_tensor("b", np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf_header(path)
    assert header.tensors["a"].offset % 128 == 0
    assert header.tensors["b"].offset == header.tensors["a"].offset + 128


def test_every_truncation_of_the_head_is_an_error(sample, tmp_path):
    whole = sample.read_bytes()
    head_bytes = min(tensor.offset for tensor in read_gguf_header(sample).tensors.values())
    alignment_padding = 32
    cut = tmp_path / "cut.gguf"
    for length in range(head_bytes - alignment_padding):
        cut.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match=r"truncated or corrupt|not a GGUF file"):
            read_gguf_header(cut)


def test_no_damage_escapes_as_another_error(sample, tmp_path):
    """Overwrites each place of the head with absurd numbers: it parses, or it is a WeightsError, and never more."""
    whole = sample.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    num_errors = 0
    values = (struct.pack("<Q", 2**62), b"\0" * 8, struct.pack("<Q", len(whole)))
    for position in range(len(whole) - 8):
        for value in (b"\xff" * 8, values[position % 3]):
            damaged.write_bytes(whole[:position] + value + whole[position + 8 :])
            try:
                read_gguf_header(damaged)
            except WeightsError:
                num_errors += 1
    assert num_errors > len(whole) // 2


def write_raw(path, *, keys=b"", num_keys=0, tensors=b"", num_tensors=0, version=3):
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", version, num_tensors, num_keys) + keys + tensors + b"\0" * 64)
    return path


def string(text):
    return struct.pack("<Q", len(text)) + text.encode()


def tensor(name, dims, kind=0, offset=0):
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


UINT32, ARRAY, STRING = 4, 9, 8


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"version": 1}, ["version 1", "(2, 3)"]),
        ({"version": 0x03000000}, ["big-endian"]),
        ({"num_keys": 1, "keys": struct.pack("<Q", 2**63)}, ["key 0", str(2**63)]),
        ({"num_keys": 1, "keys": string("k") + struct.pack("<I", 77)}, ["'k'", "77"]),
        ({"num_keys": 1, "keys": string("k") + struct.pack("<IIQ", ARRAY, STRING, 2**50)}, ["'k'", "strings"]),
        ({"num_keys": 1, "keys": string("k") + struct.pack("<IIQ", ARRAY, UINT32, 2**62)}, ["'k'"]),
        ({"num_keys": 1, "keys": string("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1)}, ["'k'", "9"]),
        ({"num_keys": 2, "keys": 2 * (string("k") + struct.pack("<II", UINT32, 5))}, ["'k'", "twice"]),
        ({"num_keys": 1, "keys": string("general.alignment") + struct.pack("<II", UINT32, 24)}, ["alignment", "24"]),
        ({"num_keys": 1, "keys": string("general.alignment") + struct.pack("<II", UINT32, 0)}, ["alignment", "0"]),
        ({"num_tensors": 2**60}, ["0 dimensions"]),
        ({"num_tensors": 2, "tensors": 2 * tensor("w", [4])}, ["'w'", "twice"]),
        ({"num_tensors": 1, "tensors": tensor("w", [1] * 5)}, ["'w'", "5 dimensions"]),
        ({"num_tensors": 1, "tensors": tensor("w", [])}, ["'w'", "0 dimensions"]),
        ({"num_tensors": 1, "tensors": tensor("w", [4], offset=12)}, ["'w'", "12", "32"]),
        ({"num_keys": 1, "keys": struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", UINT32, 5)}, ["UTF-8"]),
    ],
)
def test_damage_is_named(tmp_path, content, words):
    path = write_raw(tmp_path / "bad.gguf", **content)
    with pytest.raises(WeightsError) as caught:
        read_gguf_header(path)
    assert all(word in str(caught.value) for word in [*words, str(path)]), str(caught.value)


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(WeightsError, match="cannot read"):
        read_gguf_header(tmp_path / "absent.gguf")
    foreign = tmp_path / "foreign.gguf"
    for content in (b"", b"GGUF", b"PK\x03\x04" + b"\0" * 100):
        foreign.write_bytes(content)
        with pytest.raises(WeightsError, match="not a GGUF file"):
            read_gguf_header(foreign)
