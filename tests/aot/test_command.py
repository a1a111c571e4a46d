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


@pytest.mark.parametrize(("target", "topology"), [("h100", "h100:1"), ("v5e", "v5e:1")])
def test_the_command_compiles(target, topology, tmp_path):
    if (why := missing(target)) is not None and python() == sys.executable:
        pytest.skip(f"{target}: {why}")
    write_json(tmp_path / "models" / "small" / "target.json", TARGET)
    write_json(tmp_path / "models" / "small" / "head.json", HEAD)
    (tmp_path / "small.yaml").write_text(CONFIG)
    command = [python(), "-m", "jaxspec.cli", "aot", "--config", str(tmp_path / "small.yaml"), "--topology", topology]
    done = subprocess.run(
        [*command, "--json"], cwd=ROOT, env=judging.child_environment(), capture_output=True, text=True, timeout=570,
        check=False,
    )  # fmt: skip
    if done.returncode == 2 and "is not installed" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    programs = report["compiled"]["programs"]
    assert [(one["name"], one["layers"]) for one in programs] == [
        ("prefill[T=32]", 2), ("decode_round[B=4]", 2), ("prefill[T=32]", 4), ("decode_round[B=4]", 4),
    ]  # fmt: skip
    assert report["fit"]["is_compiled"]
    assert report["fit"]["temp_bytes"] == max(int(size) for size in report["compiled"]["temp_bytes"].values())
    assert all(one["temp_bytes"] > 0 and one["collectives"] == {} for one in programs)
    # Two more layers are two more layers' weights and pages, and nothing else.
    pages = {one["layers"]: one["argument_bytes"] for one in programs if one["name"].startswith("decode")}
    layer = 2 * (8 * 32 * 128 + 128 * 128 + 3 * 256 * 128) + 2 * 4 * 128
    page = report["fit"]["page_bytes"] * 6 / 7 / 6  # of the six layers and the head's one
    assert pages[4] - pages[2] == pytest.approx(2 * (layer + page * report["fit"]["wanted_pages"]), rel=0.1)
