"""Host. The child process of one target: compiles everything for it, and prints a JSON line for each program.

    python -m tests.aot.compiling TARGET

The last line of one that could not begin is {"missing": why}. It needs `jaxspec.aot.topology.ENVIRONMENT`.
"""

import functools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.cache.pages import pool_shape
from jaxspec.models.base import Tokens
from jaxspec.models.registry import family_of
from jaxspec.pallas_kernels.rejection.api import reject
from jaxspec.pallas_kernels.rejection.arg_specs import REJECTION_SPECS, RejectionSpec
from jaxspec.pallas_kernels.rejection.rules import BLOCK, COUPLED, GREEDY, STANDARD
from jaxspec.shards import TENSOR
from jaxspec.step import pack
from jaxspec.step.rounds import decode_round, decode_rounds
from jaxspec.step.target import Target
from jaxspec.types import ArraySpec
from jaxspec.weights.checkpoint import open_checkpoint
from tests.aot.targets import GPUS, TPUS, devices, missing
from tests.contracts import members
from tests.oracle.folders import TINY

WHOLE_TARGETS = ("h100", "v5e")  # for which every family is compiled, and memory is read
ROUNDS = {"ngram": "coupled", "probabilistic": "standard"}  # proposer: rule
SPECS = {spec.name: spec for spec in REJECTION_SPECS}


# kind: the shapes and rules whose memory is read
MEASURED = {
    "plain": ("llama3", (GREEDY, STANDARD)),
    "top_p": ("llama3", (GREEDY, STANDARD)),
    "penalties": ("llama3_penalised", (GREEDY, STANDARD)),
    "block_with_q": ("llama3_with_q", (GREEDY, BLOCK)),
}


class Program(NamedTuple):
    """Something to compile. is_measured: its memory counts, so XLA must take its time; specs: on two devices, where the
    arguments lie, a tree of PartitionSpec each."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    is_measured: bool = False
    may_not_spill: bool = False
    specs: tuple[Any, ...] | None = None


def programs(target: str, platform: str) -> Iterator[Program]:
    """Everything that must compile for a target: kernels at each shape, whole rounds, and what memory is read of."""
    for spec in SPECS.values():
        if "device" in spec.tags:
            rules = (GREEDY, STANDARD) if spec.has_rates else (GREEDY, STANDARD, COUPLED, BLOCK)
            run = functools.partial(reject, rules=rules, implementation="pallas", platform=platform)
            yield Program(f"reject[{spec.name}]", _by_name(run), (spec.arguments(),), may_not_spill=True)
    for name, rule in ROUNDS.items():
        proposer = members.make_proposer(name)
        what = Target(members.FAMILY, members.CONFIG, rule, "pallas", platform)
        weights, state = (
            jax.eval_shape(members.make_weights),
            jax.eval_shape(functools.partial(members.make_state, proposer)),
        )
        batch = pack.pack_batch([], [], members.ROWS, members.ROWS, members.MAX_LEN // members.PAGE_SIZE)
        run = functools.partial(decode_round, what, proposer)
        yield Program(f"decode_round[{name}]", run, (weights, state, batch))
        run = functools.partial(decode_rounds, what, proposer, 4)
        yield Program(f"decode_rounds[{name}]", run, (weights, state, batch, np.int32(4)))
    if target in TPUS:  # of GPUs no two can be described without one
        yield _split_reject(platform)
    if target in WHOLE_TARGETS:
        yield from map(_family, members.FAMILY_MEMBERS)
        yield from _measured(platform)


def _split_reject(platform: str) -> Program:
    """The kernels over half of the vocabulary each, and what joins them."""
    arguments = RejectionSpec("split", 7, 3, 8194, True, "bfloat16", has_penalties=True).arguments()
    whole, half = PartitionSpec(), PartitionSpec(None, TENSOR)
    specs = jax.tree.map(lambda leaf: whole, arguments)
    specs |= {"logits_RV": half, "draft_logits_NV": half, "penalties": specs["penalties"]._replace(counts_BV=half)}
    rules = (GREEDY, STANDARD, COUPLED, BLOCK)
    run = _by_name(functools.partial(reject, rules=rules, implementation="pallas", platform=platform))
    mapped = jax.shard_map(run, in_specs=(specs,), out_specs=whole)
    return Program("reject[split over two]", mapped, (arguments,), specs=(specs,))


def _family(name: str) -> Program:
    """A golden folder's forward pass over pages, and its logits: two rows of three positions, in bfloat16."""
    with open_checkpoint(TINY / name) as checkpoint:
        config = checkpoint.config
    family = family_of(config.family)
    specs = family.specs(config, jnp.bfloat16)
    weights = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, ArraySpec),
    )
    pool = jax.ShapeDtypeStruct(pool_shape(config, 8, 4), jnp.bfloat16)
    ids_BT = np.zeros((2, 3), np.int32)
    tokens = Tokens(token_ids_BT=ids_BT, positions_BT=ids_BT, slots_BT=ids_BT, pages_BM=np.zeros((2, 4), np.int32))

    def run(weights: Any, pool: Any, tokens: Tokens) -> Any:
        hidden_BTD, pool = family.forward(weights, config, tokens, pool)
        return family.logits(weights, config, hidden_BTD), pool

    return Program(f"family[{name}]", run, (weights, pool, tokens))


def _measured(platform: str) -> Iterator[Program]:
    """B=64, K=5, V=128256: without filters, with them, with penalties, and with all of it and a drafter's logits."""
    off = {"top_k_R": 0, "top_p_R": 1.0, "min_p_R": 0.0}
    for implementation, kinds in (("pallas", MEASURED), ("reference", ["top_p"]), ("straightforward", ["top_p"])):
        for kind in kinds:
            spec, rules = MEASURED[kind]
            arguments = SPECS[spec].arguments()
            run = _by_name(functools.partial(reject, rules=rules, implementation=implementation, platform=platform))
            if implementation == "straightforward":
                run = _straightforward
            if kind == "plain":  # constants, so that no filter is in the program at all
                shapes = {name: arguments.pop(name) for name in off}
                run = functools.partial(_with_constants, run, shapes, off)
            yield Program(f"memory[{kind}, {implementation}]", run, (arguments,), is_measured=True)


def _straightforward(arguments: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """What the standard rule needs of every position, as one would write it down: probabilities after a sort."""
    x_RV = arguments["logits_RV"] / arguments["temperature_R"][:, None]
    prob_RV = jax.nn.softmax(x_RV, axis=-1)
    sorted_RV = -jnp.sort(-prob_RV, axis=-1)
    is_before_RV = jnp.cumsum(sorted_RV, axis=-1) - sorted_RV < arguments["top_p_R"][:, None]
    least_R = jnp.min(jnp.where(is_before_RV, sorted_RV, jnp.float32(1)), axis=-1)
    prob_RV = jnp.where(prob_RV >= least_R[:, None], prob_RV, jnp.float32(0))
    drafted_N = prob_RV[arguments["target_rows_N"], arguments["draft_token_ids_N"]]
    return drafted_N, jax.random.categorical(jax.random.key(0), jnp.log(prob_RV), axis=-1)


def _with_constants(run, shapes: dict[str, Any], values: dict[str, float], given: dict[str, Any]):
    return run(given | {name: jnp.full(shape.shape, values[name], shape.dtype) for name, shape in shapes.items()})


def _by_name(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda arguments: function(**arguments)


def options(target: str, program: Program) -> dict[str, Any]:
    """XLA's options: as little work as possible, except where its result is read."""
    if target in TPUS:
        return {} if program.is_measured else {"exec_time_optimization_effort": -1.0}
    # On B200 the widest kernel (gemma_large_batch) does spill: it compiles, and wants tuning on the device.
    may_not_spill = program.may_not_spill and target == "h100"
    return {"xla_gpu_fail_ptx_compilation_on_register_spilling": True} if may_not_spill else {}


def main(target: str) -> None:
    why = missing(target)
    if why is not None:
        print(json.dumps({"missing": why}))
        return
    there = devices(target)
    platform = there[0].platform
    assert (platform == "gpu") == (target in GPUS)
    for program in programs(target, platform):
        mesh = Mesh(np.array(there[: 1 if program.specs is None else 2]), (TENSOR,))
        specs = program.specs or jax.tree.map(lambda leaf: PartitionSpec(), program.arguments)
        arguments = jax.tree.map(
            lambda leaf, spec, mesh=mesh: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
            ),
            program.arguments,
            specs,
        )
        started = time.perf_counter()
        try:
            with jax.set_mesh(mesh):  # kernels ask the mesh what chip they are for
                lowered = jax.jit(program.function).lower(*arguments)
            memory = lowered.compile(compiler_options=options(target, program)).memory_analysis()
            outcome = {"temp_bytes": memory.temp_size_in_bytes, "peak_bytes": memory.peak_memory_in_bytes}
        except Exception:
            outcome = {"error": traceback.format_exc()}
        seconds = round(time.perf_counter() - started, 2)
        print(json.dumps({"name": program.name, "seconds": seconds} | outcome), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
