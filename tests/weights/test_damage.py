"""Host. Every reader, every kind of damage: one clear error or the whole tensor table, in little memory and time."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxspec.errors import JaxspecError
from jaxspec.weights.checkpoint import open_tensors
from jaxspec.weights.gguf import GgufReader
from jaxspec.weights.orbax import write_index, write_orbax_shard

ROOT = Path(__file__).resolve().parents[2]
FORMS = ("safetensors", "sharded", "torch", "gguf", "orbax")
EXTRA_BYTES = 256 << 20  # address space that a fuzzed reader may take beyond what the imports hold


def make(form, folder):
    """A small checkpoint of each form; returns the files to damage."""
    tiny = ROOT / "tests" / "data" / "goldens" / "tiny"
    if form == "safetensors":
        shutil.copy(tiny / "dflash" / "model.safetensors", folder)
    elif form == "sharded":
        for file in (tiny / "mlp-speculator").glob("model*"):
            shutil.copy(file, folder)
    elif form == "torch":
        shutil.copy(tiny / "eagle3" / "pytorch_model.bin", folder)
    elif form == "orbax":
        write_orbax_shard(folder / "orbax-0", {"a": np.ones((40, 30), np.float32), "b": np.arange(5)})
        write_index(folder, {"a": "orbax-0", "b": "orbax-0"})
    else:
        writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
        writer.add_block_count(1)
        writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
        writer.add_tensor("plain", np.ones((4, 32), np.float32))
        raw = np.zeros((4, 18), np.uint8)
        writer.add_tensor("packed", raw, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read_all(form, folder):
    with GgufReader(folder / "model.gguf") if form == "gguf" else open_tensors(folder) as reader:
        for name, info in reader.tensors.items():
            assert reader.read(name).shape == info.shape


def damages(content, rng, num_each):
    """Cut short at many places, single bytes changed, and eight bytes made absurd, mostly where headers are."""
    size = len(content)
    places = [*rng.integers(0, size, num_each), *rng.integers(0, min(size, 2000), num_each)]
    places += [size - 1 - int(place) for place in rng.integers(0, min(size, 1200), num_each)]
    for place in map(int, places):
        yield content[:place]
        yield content[:place] + bytes([int(rng.integers(0, 256))]) + content[place + 1 :]
        absurd = [b"\xff" * 8, (2**62).to_bytes(8, "little"), (2**31).to_bytes(8, "little")][place % 3]
        yield content[:place] + absurd + content[place + 8 :]


def fuzz(form, folder, num_each):
    """The errors; anything but an error of ours propagates."""
    files = make(form, folder)
    read_all(form, folder)
    rng, errors = np.random.default_rng(7), []
    for path in files:
        content = path.read_bytes()
        for damaged in damages(content, rng, num_each):
            path.write_bytes(damaged)
            try:
                read_all(form, folder)
            except JaxspecError as error:
                errors.append(str(error))
        path.write_bytes(content)
    return errors


@pytest.mark.parametrize("form", FORMS)
def test_damage_is_a_clear_error_in_little_memory(form, tmp_path):
    """In a process of its own whose address space is limited: an absurd size must not even be asked for."""
    num_each = 4 if form == "orbax" else 25
    done = subprocess.run(
        [sys.executable, "-m", "tests.weights.test_damage", form, str(tmp_path), str(num_each)],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= num_each


def test_a_path_outside_the_folder_is_never_followed(tmp_path):
    """An index is text from the network: absolute paths, parents, null bytes and links of folders."""
    (tmp_path / "model").mkdir()
    make("safetensors", tmp_path)
    for wrong in ("../model.safetensors", str(tmp_path / "model.safetensors"), "..", ".", "", "a\0b", "x/../y"):
        index = tmp_path / "model" / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"w": wrong}}))
        with pytest.raises(JaxspecError, match="plain file names"):
            open_tensors(tmp_path / "model")


if __name__ == "__main__":
    make("orbax", Path(sys.argv[2])) if sys.argv[1] == "orbax" else None  # its threads start before the limit
    shutil.rmtree(Path(sys.argv[2]) / "orbax-0", ignore_errors=True)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    found = fuzz(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    assert all(sys.argv[2] in message or "tensor" in message for message in found), found
    print(len(found))
