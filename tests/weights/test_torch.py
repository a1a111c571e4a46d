"""Host. PyTorch files without PyTorch: what it wrote, what drafters are published as, and pickles that mean harm."""

import io
import json
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxspec.errors import WeightsError
from jaxspec.weights.torch_pickle import read_state_dict
from jaxspec.weights.torch_zip import MAX_DIRECTORY_BYTES, TorchReader
from tests.weights import zips

WRITTEN = Path(__file__).resolve().parent.parent / "data" / "torch"  # by scripts/make_torch_files.py
BASE = np.arange(24, dtype=np.float32).reshape(4, 6)


def read_all(path):
    with TorchReader(path) as reader:
        arrays = {name: reader.read(name) for name in reader.tensors}
        assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == {
            name: (info.shape, info.dtype) for name, info in reader.tensors.items()
        }
        return arrays


@pytest.mark.parametrize("file", ["dtypes.pt", "newer_dtypes.pt"])
def test_every_dtype(file):
    arrays = read_all(WRITTEN / file)
    assert len(arrays) == (10 if file == "dtypes.pt" else 5)
    for name, array in arrays.items():
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
        assert array.dtype == dtype
        np.testing.assert_array_equal(array.astype(np.float64), np.arange(6).reshape(2, 3).astype(dtype).astype(float))


@pytest.mark.parametrize("file", ["views.pt", "protocol4.pt"])
def test_views_of_one_storage(file):
    wanted = {
        "whole": BASE, "transposed": BASE.T, "column": BASE[:, 2], "block": BASE[1:3, 2:5],
        "every_other": BASE.reshape(-1)[1::2], "scalar": BASE[1, 1], "empty": BASE[:0], "parameter": np.arange(3),
    }  # fmt: skip
    arrays = read_all(WRITTEN / file)
    assert list(arrays) == list(wanted)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, wanted[name])
        assert not array.flags.writeable or not array.size


def test_a_module_with_its_version_table():
    assert {name: array.shape for name, array in read_all(WRITTEN / "module.pt").items()} == {
        "weight": (2, 3),
        "bias": (2,),
    }


@pytest.mark.parametrize("name", ["eagle1", "eagle1-fcbias", "eagle3", "medusa"])
def test_published_drafters(tiny_goldens, name):
    case = json.loads((tiny_goldens / name / "case.json").read_text())
    with TorchReader(tiny_goldens / name) as reader:
        assert sorted(reader.tensors) == case["tensors"]
        floats = {info.dtype.name for info in reader.tensors.values()} - {"int64", "bool"}
        assert floats == {case["weights"]["dtype"]}
        assert all(np.isfinite(reader.read(name).astype(np.float32)).all() for name in reader.tensors)


def test_the_maps_of_eagle3_agree_with_each_other(tiny_goldens):
    """d2t holds offsets to the kept ids, t2d marks them: values read wrongly would not fit together."""
    with TorchReader(tiny_goldens / "eagle3") as reader:
        kept = np.arange(48) + reader.read("d2t")
        np.testing.assert_array_equal(np.flatnonzero(reader.read("t2d")), kept)


def test_reads_cast_and_outlive_the_reader(tmp_path):
    path = zips.write(tmp_path, zips.pack(zips.state(w=zips.tensor())))
    wanted = np.frombuffer(bytes(range(24)), "<f4").reshape(2, 3)
    with TorchReader(path) as reader:
        view, cast = reader.read("w"), reader.read("w", np.dtype(ml_dtypes.bfloat16))
        reader.release("w")
        with pytest.raises(WeightsError, match="no tensor 'v'"):
            reader.read("v")
    np.testing.assert_array_equal(view, wanted)
    np.testing.assert_array_equal(cast, wanted.astype(ml_dtypes.bfloat16))
    with pytest.raises(WeightsError, match="closed"):
        reader.read("w")


def test_shards(tmp_path):
    for index in (1, 2):
        data = np.full(6, index, np.float32).tobytes()
        content = zips.pack(zips.state(**{f"w{index}": zips.tensor()}), data=data)
        (tmp_path / f"pytorch_model-{index}.bin").write_bytes(content)
    weight_map = {"w1": "pytorch_model-1.bin", "w2": "pytorch_model-2.bin"}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    arrays = read_all(tmp_path)
    assert {name: array.tolist() for name, array in arrays.items()} == {"w1": [[1] * 3] * 2, "w2": [[2] * 3] * 2}
    for changed, words in (
        ({"w1": "pytorch_model-2.bin"}, "contradicts"),
        ({"w3": "pytorch_model-2.bin"}, "contradicts"),
        ({"w1": "absent.bin"}, "lacks shards"),
        ({"w1": "../pytorch_model-1.bin"}, "plain file names"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map | changed}))
        with pytest.raises(WeightsError, match=words):
            TorchReader(tmp_path)


def test_several_files_need_an_index_and_leftovers_of_training_are_none(tmp_path):
    content = zips.pack(zips.state(w=zips.tensor()))
    for name in ("medusa_lm_head.pt", "training_args.bin"):
        (tmp_path / name).write_bytes(content)
    assert list(read_all(tmp_path)) == ["w"]
    (tmp_path / "other.bin").write_bytes(content)
    with pytest.raises(WeightsError, match=r"2 PyTorch files \(medusa_lm_head\.pt, other\.bin\)"):
        TorchReader(tmp_path)


def tar(path):
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        ("before_1_6.pt", ["before 1.6", "safetensors"]),
        ("training.pt", ["'model' is a dict", "state dict alone"]),
        ("whole_module.pt", ["torch.nn.modules.linear.Linear", "run code"]),
        ("torchscript.pt", ["TorchScript"]),
        (tar, ["tar file"]),
        (lambda path: path.write_bytes(b""), ["PyTorch zip file"]),
        (lambda path: path.write_bytes(b"\x80\x04}."), ["PyTorch zip file"]),
        (lambda path: path.write_bytes(b"PK\3\4" + bytes(100)), ["zip directory"]),
        (lambda path: path.write_bytes(zips.pack(zips.state(), {"byteorder": b"big"})), ["byte", "b'big'"]),
        (lambda path: path.write_bytes(zips.pack(b"", root="a/b")), ["0 data.pkl"]),
        (lambda path: path.write_bytes(zips.pack(zips.PROTO + b"]" + zips.STOP)), ["holds a list"]),
        (lambda path: path.write_bytes(zips.pack(zips.state(w=b"K\x01"))), ["'w' is a int"]),
    ],
)  # fmt: skip
def test_what_is_no_state_dict_is_refused_by_name(tmp_path, make, words):
    path = tmp_path / "file.bin" if callable(make) else WRITTEN / make
    if callable(make):
        make(path)
    with pytest.raises(WeightsError) as caught:
        TorchReader(path)
    assert all(word in str(caught.value) for word in [path.name, *words]), str(caught.value)
    assert "\n" not in str(caught.value)


class Harm:
    def __reduce__(self):
        return exec, ("raise SystemExit('the pickle was run')",)


REBUILD = zips.find("torch._utils", "_rebuild_tensor_v2")
NESTED = b"q\x00h\x00\x86" * 200  # (t, t) of (t, t) of …: to hash it takes 2^200 steps

HARMFUL = {
    "code": (pickle.dumps({"w": Harm()}, 2), "exec"),
    "code, protocol 4": (pickle.dumps({"w": Harm()}, 4), "exec"),
    "attribute of an allowed module": (zips.state(w=zips.find("torch", "load")), "torch.load"),
    "dotted name": (zips.state(w=zips.find("collections", "OrderedDict.fromkeys")), "fromkeys"),
    "call of text": (zips.state(w=zips.text("f") + b")R"), "called"),
    "call of a dtype": (zips.state(w=zips.find("torch", "FloatStorage") + b")R"), "called"),
    "memo of 64 GB": (zips.PROTO + b"}r" + struct.pack("<I", 2**32 - 1) + b"0.", "POP"),
    "bytes of an exabyte": (zips.PROTO + b"\x8e" + struct.pack("<Q", 2**60) + b"abc.", "expected"),
    "text of four gigabytes": (zips.PROTO + b"X" + struct.pack("<I", 2**32 - 1) + b"abc.", "expected"),
    "nested key": (zips.PROTO + b"})" + NESTED + b"K\x01s.", "key"),
    "key that is a number": (zips.PROTO + b"}K\x01" + zips.tensor() + b"s.", "key"),
    "name twice": (
        zips.PROTO + b"}(" + 2 * (zips.text("w") + zips.tensor()) + b"u.", "occurs twice"),
    "state set on a list": (zips.PROTO + b"]}b.", "attributes"),
    "instance by opcode": (zips.PROTO + b"(ios\nsystem\n.", "INST"),
    "extension": (zips.PROTO + b"\x82\x01.", "EXT1"),
    "new object": (zips.PROTO + zips.find("collections", "OrderedDict") + b")\x81.", "NEWOBJ"),
    "no end": (zips.PROTO + b"}", "exhausted"),
    "nothing": (b"", "exhausted"),
    "empty stack": (zips.PROTO + b".", "damaged"),
    "run without a mark": (zips.PROTO + b"}u.", "mark"),
    "memo never set": (zips.PROTO + b"h\x05.", "damaged"),
    "unknown opcode": (zips.PROTO + b"\xff.", "unknown"),
    "reference that is no storage": (zips.PROTO + zips.text("x") + b"Q.", "no storage"),
    "storage of no type": (
        zips.state(w=zips.tensor(zips.storage(kind="UntypedStorage", module="torch.storage"))), "dtype"),
    "storage of negative size": (zips.state(w=zips.tensor(zips.storage(num_values=-6))), "whole number"),
    "tensor of no storage": (
        zips.state(w=REBUILD + zips.run_of(*[b"K\x01"] * 6) + b"R"), "no storage"),
    "tensor of too little": (
        zips.state(w=REBUILD + b")R"), "damaged"),
    "a flag for a size": (
        zips.state(w=zips.tensor().replace(zips.integers((2, 3)), zips.run_of(b"\x88", zips.integer(3)))),
        "whole numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_pickles_are_refused_and_never_run(tmp_path, name):
    content, word = HARMFUL[name]
    with pytest.raises(ValueError, match=word):
        read_state_dict(content)
    with pytest.raises(WeightsError, match=word) as caught:
        TorchReader(zips.write(tmp_path, zips.pack(content)))
    assert len(str(caught.value)) < 600


def test_a_pickle_nested_without_end_is_described_in_few_words():
    deep = zips.PROTO + b"}(" + zips.text("w") + b")" + NESTED + b"u."
    with pytest.raises(ValueError, match="'w' is a tuple"):
        read_state_dict(deep)


def test_the_globals_of_every_published_pickle_are_allowed_and_no_other(tiny_goldens):
    from jaxspec.weights.torch_pickle import ALLOWED_GLOBALS

    seen = set()
    for name in ("eagle1", "eagle1-fcbias", "eagle3", "medusa"):
        case = json.loads((tiny_goldens / name / "case.json").read_text())
        seen |= {words.replace(" ", ".") for words in case["weights"]["pickle"]["globals"]}
    assert seen <= ALLOWED_GLOBALS
    assert all(
        name.startswith(("torch.", "torch._utils._rebuild", "collections.OrderedDict")) for name in ALLOWED_GLOBALS
    )


@pytest.mark.parametrize(
    ("view", "words"),
    [
        ({"offset": 1}, "reaches past"),
        ({"offset": 2**70}, "reaches past"),
        ({"offset": -1}, "offset -1"),
        ({"shape": (3, 3)}, "reaches past"),
        ({"shape": (2**40, 2**40)}, "has shape"),
        ({"shape": (-2, -3)}, "has shape"),
        ({"shape": (2,)}, "has shape"),
        ({"strides": (3, 2)}, "reaches past"),
        ({"strides": (-3, 1)}, "has shape"),
        ({"strides": (2**62, 1)}, "reaches past"),
        ({"shape": (2**40, 1), "strides": (0, 1)}, "repeats"),
        ({"shape": (1,) * 9, "strides": (1,) * 9}, "has shape"),
        ({"stored": zips.storage(num_values=7)}, "24 bytes"),
        ({"stored": zips.storage(num_values=2**62)}, "24 bytes"),
        ({"stored": zips.storage(key="1")}, "not in the file"),
        ({"stored": zips.storage(key="../data.pkl")}, "not in the file"),
    ],
)
def test_views_outside_their_storage(tmp_path, view, words):
    with pytest.raises(WeightsError, match=words) as caught:
        TorchReader(zips.write(tmp_path, zips.pack(zips.state(w=zips.tensor(**view)))))
    assert "'w'" in str(caught.value)


def edit_directory(content: bytes, name: bytes, offset: int, value: bytes) -> bytes:
    """The zip with bytes of one entry's directory record replaced."""
    at = content.rindex(b"archive/" + name) - 46 + offset
    return content[:at] + value + content[at + len(value) :]


GOOD = zips.pack(zips.state(w=zips.tensor()))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (zips.pack(zips.state(w=zips.tensor()), compression=zipfile.ZIP_DEFLATED), "compressed"),
        (edit_directory(GOOD, b"data/0", 42, struct.pack("<I", 0)), "overlaps|not at byte"),
        (edit_directory(GOOD, b"data/0", 42, struct.pack("<I", 2**31)), "zip directory|begins at|not at"),
        (edit_directory(GOOD, b"data/0", 20, struct.pack("<II", 10**9, 10**9)), "ends at byte|overlaps"),
        (edit_directory(GOOD, b"data/0", 20, struct.pack("<II", 24, 10**9)), "compressed"),
        (edit_directory(GOOD, b"data/0", 8, struct.pack("<H", 1)), "encrypted"),
        (edit_directory(GOOD, b"data/0", 46, b"archive/data/1"), "not at byte"),
        (GOOD[: len(GOOD) - 10], "zip directory"),
        (GOOD[:-10] + struct.pack("<II", 2**31, 0) + b"\0\0", "zip directory"),
    ],
)
def test_zips_that_lie(tmp_path, content, words):
    with pytest.raises(WeightsError, match=words):
        TorchReader(zips.write(tmp_path, content))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_one_entry_twice(tmp_path):
    content = io.BytesIO(GOOD)
    with zipfile.ZipFile(content, "a") as archive:
        archive.writestr("archive/data/0", bytes(24))
    with pytest.raises(WeightsError, match="occurs twice"):
        TorchReader(zips.write(tmp_path, content.getvalue()))


def test_a_directory_of_any_length_is_not_taken_into_memory(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    size = MAX_DIRECTORY_BYTES + 4096
    with path.open("wb") as file:
        file.write(b"PK\3\4")
        file.truncate(size)  # a hole in place of a directory of this length
        file.seek(size)
        file.write(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, size, 0, 0))
    with pytest.raises(WeightsError, match="directory is longer"):
        TorchReader(path)
