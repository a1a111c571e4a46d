"""Host. T18, the second process: every program is taken from what the first one kept, and nothing is compiled."""

import json
import os
import subprocess
import sys

from tests.oracle.folders import write_llama

PROGRAM = """
import json, sys
import jax

counts = {"cache_hits": 0, "cache_misses": 0, "compiles": 0}

def count(event, **kwargs):
    name = event.rsplit("/", 1)[-1]
    if event.startswith("/jax/compilation_cache/") and name in counts:
        counts[name] += 1

def count_compiles(event, duration, **kwargs):
    counts["compiles"] += event == "/jax/core/compile/backend_compile_duration"

jax.monitoring.register_event_listener(count)
jax.monitoring.register_event_duration_secs_listener(count_compiles)
from jaxspec import Engine, SamplingParams

engine = Engine(sys.argv[1], compilation_cache_dir=sys.argv[2], max_model_len=32, max_num_seqs=1, use_tqdm=False)
params = SamplingParams(temperature=0, max_tokens=5)
(output,) = engine.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
counts["programs"] = len(engine.core.parts.programs.plan)
counts["after_ready"] = engine.compiles_after_ready
counts["token_ids"] = output.outputs[0].token_ids
print(json.dumps(counts))
"""


def test_a_second_process_compiles_nothing(tmp_path):
    folder = write_llama(tmp_path / "model", seed=4, num_layers=1)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    runs = []
    for _ in range(2):
        command = [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / "cache")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = runs
    assert first["cache_misses"] > 0
    assert second["cache_misses"] == 0
    assert first["programs"] == second["programs"] > 3
    # A hit of JAX's cache counts as a compilation, since the program is traced for it; the engine's own do not.
    assert second["compiles"] == first["compiles"] - first["programs"]
    assert first["after_ready"] == second["after_ready"] == 0
    assert first["token_ids"] == second["token_ids"]
