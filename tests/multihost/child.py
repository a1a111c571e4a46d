"""Host. One process of a job, as a script of a user's: process 0 asks and prints the answers' ids, the others follow.

Run as `python -m tests.multihost.child JSON`, with a list of {"config": of an engine, "asked": [[prompt ids, params],
...] for each call of `generate`, "faults": {its name: how}}: one engine after the other. Process 1 commits the faults.
"""

import json
import os
import signal
import sys

import jax
import numpy as np
from jax._src import distributed

from jaxspec import Engine, SamplingParams
from jaxspec.distributed import links
from jaxspec.engine import build
from jaxspec.weights.load import Parameter
from tests.lossless.engines import full_sizes_alone


def disturb(hosts, name):
    """Noise in this process's copy of what every device has whole."""
    rng = np.random.default_rng(0)

    def noisy(leaf):
        if not leaf.is_fully_replicated:
            return leaf
        value = np.asarray(leaf)
        value = value + rng.normal(scale=0.3, size=value.shape).astype(value.dtype)
        return jax.make_array_from_callback(value.shape, leaf.sharding, lambda index: value[index])

    hosts._weights = hosts._weights | {name: jax.tree.map(noisy, hosts._weights[name])}


def at_call(hosts, number, number_of_signal):
    """Send this process a signal in place of running its call of this number."""
    run = hosts._run

    def stop_or_run(*args, **kwargs):
        if hosts._num_calls == number:
            os.kill(os.getpid(), number_of_signal)
        return run(*args, **kwargs)

    hosts._run = stop_or_run


def commit(hosts, faults):
    """Process 1's."""
    if hosts.rank == 1:
        for fault, value in faults.items():
            if fault == "noise":
                disturb(hosts, value)
            else:
                at_call(hosts, value, getattr(signal, fault))


def count_reads():
    """Adds up the bytes that are read of the model's parameters."""
    read, seen = Parameter.read, {"bytes": 0, "all": {}}

    def counted(parameter, index=None):
        array = read(parameter, index)
        seen["bytes"] += array.nbytes
        seen["all"][parameter.path] = int(np.prod(parameter.shape)) * array.dtype.itemsize
        return array

    Parameter.read = counted
    return seen


def _logprobs(entries):
    """Those of the prompt's own tokens."""
    return [next(iter(entry.values())).logprob for entry in entries[1:]]


def main() -> None:
    seen = count_reads()
    build._buckets = full_sizes_alone
    jobs = json.loads(sys.argv[1])
    ours = {
        name: os.environ[f"JAXSPEC_{name.upper()}"] for name in ("nnodes", "node_rank", "master_addr", "master_port")
    }
    numbers = {name: int(value) for name, value in ours.items() if name != "master_addr"}
    for job in jobs:
        engine = Engine(**job["config"], **numbers, master_addr=ours["master_addr"], use_tqdm=False)
        print(f"read {seen['bytes']} of {sum(seen['all'].values())} bytes", file=sys.stderr)
        if engine.is_follower:
            commit(engine.core.parts.hosts, job["faults"])
            engine.follow()
            continue
        for asked in job["asked"]:
            prompts = [{"prompt_token_ids": ids} for ids, _ in asked]
            outputs = engine.generate(prompts, [SamplingParams(**params) for _, params in asked], use_tqdm=False)
            print(json.dumps([one.outputs[0].token_ids for one in outputs]), flush=True)
            if all(one.prompt_logprobs for one in outputs):
                print(json.dumps([_logprobs(one.prompt_logprobs) for one in outputs]), flush=True)
        if job is not jobs[-1]:  # the last engine ends with the script
            # NOTE: users have one engine a job; here all have met, and are to meet once more.
            distributed.global_state.client.key_value_delete(links._KEY)
            engine.shutdown()


if __name__ == "__main__":
    main()
