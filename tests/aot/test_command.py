"""Host. `jaxspec aot` compiles the round and prefill of a small config for absent devices, in its own process."""

import json
import subprocess
import sys

import pytest

from tests.aot import judging
from tests.aot.paper import write_json
from tests.aot.targets import ROOT, missing, python

pytestmark = pytest.mark.heavy

TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
HEAD = TARGET | {"num_hidden_layers": 1, "draft_vocab_size": 256}
CONFIG = """# a small one
model: small/target
max_model_len: 128
max_num_seqs: 4
max_num_batched_tokens: 32
speculative_config: {method: eagle3, model: small/head, num_speculative_tokens: 2}
"""


def report_of(target: str, topology: str, folder, *words: str) -> dict:
    """What the command says, in the interpreter that has the compilers. Skips where they are missing."""
    if (why := missing(target)) is not None and python() == sys.executable:
        pytest.skip(f"{target}: {why}")
    write_json(folder / "models" / "small" / "target.json", TARGET)
    write_json(folder / "models" / "small" / "head.json", HEAD)
    (folder / "small.yaml").write_text(CONFIG)
    command = [python(), "-m", "jaxspec.cli", "aot", "--config", str(folder / "small.yaml"), "--topology", topology]
    done = subprocess.run(
        [*command, "--json", *words], cwd=ROOT, env=judging.child_environment(), capture_output=True, text=True,
        timeout=570, check=False,
    )  # fmt: skip
    if done.returncode == 2 and "the extra aot-" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_command_compiles(tmp_path):
    report = report_of("h100", "h100:1", tmp_path)
    programs = report["compiled"]["programs"]
    assert [(one["name"], one["layers"]) for one in programs] == [
        ("prefill[T=32]", 2), ("decode_round[B=4]", 2), ("prefill[T=32]", 4), ("decode_round[B=4]", 4),
    ]  # fmt: skip
    assert report["fit"]["is_compiled"]
    assert report["fit"]["temp_bytes"] == max(int(size) for size in report["compiled"]["temp_bytes"].values())
    assert all(one["temp_bytes"] > 0 and one["collectives"] == {} for one in programs)
    # Two more layers bring their weights and their pages, and nothing else.
    arguments = {one["layers"]: one["argument_bytes"] for one in programs if one["name"].startswith("decode")}
    layer = 2 * (8 * 32 * 128 + 128 * 128 + 3 * 256 * 128) + 2 * 4 * 128
    pages = report["fit"]["wanted_pages"] * report["fit"]["page_bytes"] // 7  # of six layers and the head's one
    assert arguments[4] - arguments[2] == pytest.approx(2 * (layer + pages), rel=0.01)


def test_over_two_devices_nothing_but_sums_is_exchanged(tmp_path):
    """No gathered logits, and no gathered weight: all-reduces, of a few numbers a row or as wide as the model."""
    report = report_of("v5e", "v5e:2x2", tmp_path, "--tensor", "2", "--layers", "2")
    assert (report["tensor"], report["replicas"]) == (2, 2)
    programs = {one["name"]: one for one in report["compiled"]["programs"]}
    for name in ("prefill[T=32]", "decode_round[B=4]"):
        assert set(programs[name]["collectives"]) == {"all-reduce"}
    # Behind both embeddings, and attention and MLP of two layers and of the head's one: 32 tokens of 128 in float32.
    count, size = programs["prefill[T=32]"]["collectives"]["all-reduce"]
    assert count <= 2 * 3 + 2
    assert size == pytest.approx((2 * 3 + 2) * 32 * 128 * 4, rel=0.3)
    rows, width = 4 * 3, 128
    assert programs["decode_round[B=4]"]["collectives"]["all-reduce"][1] < 40 * rows * width * 4
