"""Host. Runs the child process of one target, and judges what it says."""

import functools
import json
import os
import subprocess

import pytest

from jaxspec.aot.topology import ENVIRONMENT
from jaxspec.pallas_kernels.rejection.arg_specs import REJECTION_SPECS
from tests.aot.compiling import MEASURED, ROUNDS
from tests.aot.targets import ROOT, python
from tests.contracts.members import FAMILY_MEMBERS


def child_environment() -> dict[str, str]:
    """Of a process that imports this checkout."""
    environment = {
        name: value
        for name, value in os.environ.items()
        # A cache of compiled programs cannot be read back without the device; and the child wants one CPU, not eight.
        if not name.startswith("JAX_COMPILATION_CACHE") and name != "XLA_FLAGS"
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *environment.get("PYTHONPATH", "").split(os.pathsep)])
    return environment


@functools.cache
def outcomes(target: str) -> dict[str, dict]:
    """{program: what became of it}. Skips where the compilers for the target are missing."""
    environment = child_environment() | dict(ENVIRONMENT)
    command = [python(), "-m", "tests.aot.compiling", target]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=570, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if lines and "missing" in lines[-1]:
        pytest.skip(f"{target}: {lines[-1]['missing']}")
    found = {line["name"]: line for line in lines}
    # num_warps = 3, say, aborts the whole process: then the last lines are what there is to say.
    assert done.returncode == 0, f"{target}: compiled {list(found)}, then\n{done.stderr[-4000:]}"
    return found


def check_compiled(found: dict[str, dict]) -> None:
    """Nothing failed, and nothing that must be there is missing."""
    assert [outcome["error"] for outcome in found.values() if "error" in outcome] == []
    kernels = {f"reject[{spec.name}]" for spec in REJECTION_SPECS if "device" in spec.tags}
    rounds = {f"{name}[{proposer}]" for name in ("decode_round", "decode_rounds") for proposer in ROUNDS}
    assert kernels | rounds <= found.keys()


def check_families(found: dict[str, dict]) -> None:
    """A member of every family was compiled; that none failed is `check_compiled`'s."""
    assert {f"family[{name}]" for name in FAMILY_MEMBERS} <= found.keys()


def check_memory(found: dict[str, dict]) -> None:
    """No [N, V] array of probabilities, nor one that is nearly as large: at B=64, K=5, V=128256."""
    quarter = 64 * 5 * 128256 * 4 // 4
    temp_bytes = {kind: found[f"memory[{kind}, pallas]"]["temp_bytes"] for kind in MEASURED}
    assert {kind: size for kind, size in temp_bytes.items() if size >= quarter} == {}
    # The measure itself: the straightforward version does hold such arrays.
    assert found["memory[top_p, straightforward]"]["temp_bytes"] >= 4 * quarter
