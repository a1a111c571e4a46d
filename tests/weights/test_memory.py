"""Host. Loading holds one tensor at a time: the peak of a process that loads many, whatever the form."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxspec.weights.orbax import write_index, write_orbax_shard
from jaxspec.weights.safetensors import SafetensorsReader
from jaxspec.weights.write import planned_dtypes, write_shards
from tests.weights import zips

ROOT = Path(__file__).resolve().parents[2]
COUNT, ROWS, COLUMNS = 24, 1024, 1024  # 4 MiB each in float32, 96 MiB together
TENSOR_BYTES = 4 * ROWS * COLUMNS
# Loads every tensor and keeps none, as a put onto another device would; prints how far the peak rose above the start.
LOAD = f"""
import sys, numpy as np
from pathlib import Path
from jaxspec.types import ArraySpec
from jaxspec.weights.checkpoint import open_tensors
from jaxspec.weights.gguf import GgufReader
from jaxspec.weights.load import load
from jaxspec.weights.names import NameTable, TensorSource
def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
path = Path(sys.argv[1])
def run(names):
    specs = {{name: ArraySpec(({ROWS}, {COLUMNS}), np.float32, ("a", "b")) for name in names}}
    table = NameTable({{name: TensorSource((name,)) for name in names}}, ("w.*",))
    with GgufReader(path) if path.is_file() else open_tensors(path) as reader:
        load(reader, specs, table, put=lambda parameter: seen.append(float(parameter.read().sum())))
seen = []
run(["w0"])  # what the libraries themselves need
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
start = peak()
run([f"w{{i}}" for i in range({COUNT})])
print(peak() - start, len(seen))
"""


def write(form, folder):
    """All zeros, so that writing is quick; returns the path to load."""
    zeros = np.zeros((ROWS, COLUMNS), np.float32)
    names = [f"w{i}" for i in range(COUNT)]
    if form == "orbax":
        write_orbax_shard(folder / "orbax-0", dict.fromkeys(names, zeros))
        write_index(folder, dict.fromkeys(names, "orbax-0"))
    elif form == "torch":
        stored = [zips.storage(key=name, num_values=zeros.size) for name in names]
        tensors = {
            name: zips.tensor(storage, shape=zeros.shape, strides=(COLUMNS, 1))
            for name, storage in zip(names, stored, strict=True)
        }
        zips.write(folder, zips.pack(zips.state(**tensors), {f"data/{name}": zeros.tobytes() for name in names}))
    elif form == "gguf":
        writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
        raw = np.zeros((ROWS, COLUMNS // 32 * 34), np.uint8)
        for name in names:
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return folder / "model.gguf"
    else:
        header, data = {}, zeros.nbytes
        for i, name in enumerate(names):
            header[name] = {"dtype": "F32", "shape": zeros.shape, "data_offsets": [i * data, (i + 1) * data]}
        text = json.dumps(header).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + COUNT * data)
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize(
    ("form", "most_tensors"),
    # TensorStore decodes in threads of its own, and lets a buffer go some while after its reader has.
    [("safetensors", 5), ("torch", 5), ("gguf", 5), ("orbax", 8)],
)
def test_loading_holds_few_tensors_at_a_time(form, most_tensors, tmp_path):
    path = write(form, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rise, seen = map(int, done.stdout.split())
    assert seen == COUNT + 1
    assert rise < most_tensors * TENSOR_BYTES, f"{rise / TENSOR_BYTES:.1f} of {COUNT} tensors"


def test_writing_holds_one_tensor_at_a_time(tmp_path):
    """Judged by who asks for what: each tensor is let go before the next is read."""
    events = []

    class Noting(SafetensorsReader):
        def read(self, name, dtype=None, index=None):
            events.append(f"read {name}")
            return super().read(name, dtype, index)

        def release(self, name):
            events.append(f"release {name}")
            super().release(name)

    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    write("safetensors", tmp_path / "in")
    with Noting(tmp_path / "in") as reader:
        write_shards(reader, tmp_path / "out", "safetensors", planned_dtypes(reader, "bfloat16"), 10 * TENSOR_BYTES)
    first = [event for event in events if event.startswith("read")]
    assert first == [f"read w{i}" for i in range(COUNT)]
    assert all(events[events.index(f"read w{i}") + 1] == f"release w{i}" for i in range(COUNT))
