"""Host. A process that runs one rejection program and prints its peak memory, predicted and measured.

python -m tests.device.memory SPEC
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp

from jaxspec.pallas_kernels.rejection.api import reject
from jaxspec.pallas_kernels.rejection.arg_specs import REJECTION_SPECS
from jaxspec.pallas_kernels.rejection.rules import GREEDY, STANDARD


def main(name: str) -> None:
    spec = next(spec for spec in REJECTION_SPECS if spec.name == name)
    platform = jax.default_backend()
    run = jax.jit(functools.partial(reject, rules=(GREEDY, STANDARD), platform=platform))
    compiled = run.lower(**spec.arguments()).compile()
    arguments = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec.arguments())
    jax.block_until_ready(compiled(**arguments))
    stats = jax.local_devices()[0].memory_stats()
    measured = None if stats is None else stats["peak_bytes_in_use"]
    print(json.dumps({"predicted": compiled.memory_analysis().peak_memory_in_bytes, "measured": measured}))


if __name__ == "__main__":
    main(sys.argv[1])
