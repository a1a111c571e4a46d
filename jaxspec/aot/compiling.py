"""Host. The child process that compiles for devices that are not there, and prints a JSON line for each program.

    python -m jaxspec.aot.compiling < request.json

It is a process of its own because JAX must find `topology.ENVIRONMENT` when it is imported, and because a kernel that
the compiler chokes on may end the process.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.aot.topology import ENVIRONMENT, Topology, devices, missing, topology_of
from jaxspec.config.engine import EngineConfig
from jaxspec.errors import ConfigError, JaxspecError

LAYERS = (2, 4)
# Without it a sort wants a CUDA runtime, which is there on the device alone.
OPTIONS: dict[str, dict[str, Any]] = {"gpu": {"xla_gpu_enable_cub_radix_sort": False}, "tpu": {}}
COLLECTIVES = re.compile(
    r"= (?P<shape>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"(pred|[a-z]+)(\d*)\[([\d,]*)\]")


def compile_in_child(
    config: EngineConfig,
    folders: Sequence[Path],
    topology: Topology,
    num_pages: int,
    *,
    layers: Sequence[int] = LAYERS,
    timeout: float | None = None,
) -> list[dict[str, Any]]:
    """Compile the largest round and the largest chunk of the config, at each number of layers.

    Args:
        num_pages: of the pools.
        timeout: seconds.

    Returns:
        One dictionary a program: name, layers, seconds, temp_bytes, argument_bytes, peak_bytes, flops and bytes where
        the compiler says (else None), collectives {kind: [number, bytes]}; or error in place of the figures.

    Raises:
        ConfigError: nothing can be compiled here, and why.
    """
    why = missing(topology.chip)
    if why is not None:
        raise ConfigError(f"cannot compile for {topology.name}: {why}; or leave it out with --no-compile")
    request = {
        "config": config.model_dump(mode="json", exclude_unset=True)
        | {name: getattr(config, name) for name in ("tensor_parallel_size", "data_parallel_size")},
        "folders": [str(folder.resolve()) for folder in folders],
        "topology": topology.name,
        "num_pages": num_pages,
        "layers": list(layers),
    }
    # A cache of compiled programs cannot be read back without the device.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    kept.pop("XLA_FLAGS", None)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jaxspec.aot.compiling"],
            input=json.dumps(request),
            env=kept | dict(ENVIRONMENT),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"compiling for {topology.name} took more than {timeout} s; raise --timeout") from None
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        said = done.stderr.strip().splitlines()[-3:]
        lines.append({"name": "the compiler's process", "layers": 0, "error": f"it ended: {' '.join(said)[-600:]}"})
    return lines


def collectives(text: str) -> dict[str, list[int]]:
    """{kind: [how many, bytes of their results]} of a compiled program's text, as it stands: what a loop's body holds
    counts once."""
    found: dict[str, list[int]] = {}
    for match in COLLECTIVES.finditer(text):
        size = 0
        for kind, bits, dims in _ARRAY.findall(match["shape"]):
            number = 1
            for dim in dims.split(","):
                number *= int(dim) if dim else 1
            size += number * (1 if kind == "pred" else max(int(bits or 8) // 8, 1))
        entry = found.setdefault(match["kind"], [0, 0])
        entry[0] += 1
        entry[1] += size
    return found


def main() -> int:
    """Read a request, compile. Returns 0, or 1 where nothing can be compiled."""
    request = json.loads(sys.stdin.read())
    try:
        _compile(request)
    except JaxspecError as error:
        print(json.dumps({"name": "config", "layers": 0, "error": str(error)}), flush=True)
    return 0


def _compile(request: dict[str, Any]) -> None:
    from jaxspec.aot.describe import describe
    from jaxspec.aot.parts import make_parts, shorten
    from jaxspec.aot.settle import settle

    topology = topology_of(request["topology"])
    config = EngineConfig(**request["config"])
    described = describe(config, [Path(folder) for folder in request["folders"]])
    resolved = settle(config, described, topology).model_copy(update={"num_pages": request["num_pages"]})
    there = devices(topology)[: resolved.tensor_parallel_size * resolved.data_parallel_size]
    for layers in request["layers"]:
        short = shorten(described, min(layers, described.target.num_layers))
        parts = make_parts(short, resolved, there[0].platform, devices=there)
        for name, program in parts.programs().items():
            started = time.perf_counter()
            outcome: dict[str, Any] = {"name": name, "layers": short.target.num_layers}
            try:
                compiled = program.lower().compile(compiler_options=OPTIONS[topology.chip.platform])
                memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
                outcome |= {
                    "temp_bytes": memory.temp_size_in_bytes,
                    "argument_bytes": memory.argument_size_in_bytes,
                    "peak_bytes": memory.peak_memory_in_bytes,
                    "flops": cost.get("flops"),
                    "bytes": cost.get("bytes accessed"),
                    "collectives": collectives(compiled.as_text()),
                }
            except Exception as error:
                outcome["error"] = f"{type(error).__name__}: {str(error)[:800]}"
            outcome["seconds"] = round(time.perf_counter() - started, 2)
            print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
