"""Host. Engines for lossless tests: tiny models in float32, whose caches hold NaN wherever nothing was written."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.config.engine import EngineConfig
from jaxspec.engine import build
from jaxspec.engine.engine import Engine
from jaxspec.step import programs
from jaxspec.types import Int8Pool

VOCAB_SIZE = 32
MAX_MODEL_LEN = 64
NUM_ROWS = 3
CHUNK_TOKENS = 16
PAGE_SIZE = 4
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": NUM_ROWS,
    "max_num_batched_tokens": CHUNK_TOKENS,
    "block_size": PAGE_SIZE,
    "compilation_cache_dir": None,
    "enable_structured_outputs": False,
    "gpu_memory_utilization": 0.2,
}


# tests/conftest.py turns compilers down for the whole suite. These give the HLO that users get, and also its code.
SAME_HLO = {"xla_cpu_use_fusion_emitters": True}
SAME_CODE = SAME_HLO | {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def make_engine(model, speculative_config=None, *, buckets: bool = False, options=None, **config) -> Engine:
    """An engine over a model folder.

    Args:
        buckets: compile for every bucket, not for full batches and chunks alone.
        options: the compiler's, in place of the suite's.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not buckets:
            patch.setattr(build, "_buckets", full_sizes_alone)
        if options is not None:
            patch.setattr(programs, "_compile", functools.partial(_compile_with, options))
        engine = Engine(str(model), speculative_config=speculative_config, use_tqdm=False, **(DEFAULTS | config))
    poison(engine)
    return engine


def make_parts(model, speculative_config, **config) -> build.EngineParts:
    """What an engine drives, but that nothing is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "Programs", lambda *args, **more: SimpleNamespace(plan=[], compile_seconds=0.0))
        patch.setattr(build, "_log_plan", lambda *args: None)
        return build.build(EngineConfig(model=str(model), speculative_config=speculative_config, **(DEFAULTS | config)))


def full_sizes_alone(resolved):
    """In place of `build._buckets`: full batches and chunks, and none between."""
    rows, tokens = resolved.max_num_seqs, resolved.max_num_batched_tokens
    return (rows,), (rows,), (tokens,)


def _compile_with(options, lowered):
    return lowered.compile(compiler_options=options)


def poison(engine: Engine) -> None:
    """NaN in every page, the drafter's too: a key that is read without having been written shows."""
    core = engine.core
    pool_ndim = 4 + (engine.config.data_parallel_size > 1)
    assert not core.has_work

    def nan(leaf):
        if isinstance(leaf, Int8Pool):
            return Int8Pool(
                values_PGSH=jnp.full_like(leaf.values_PGSH, 127), scale_PGS=jnp.full_like(leaf.scale_PGS, jnp.nan)
            )
        is_pool = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim == pool_ndim
        return jnp.full_like(leaf, jnp.nan) if is_pool else leaf

    def spoil(tree):
        return jax.tree.map(nan, tree, is_leaf=lambda leaf: isinstance(leaf, Int8Pool))

    core.state = dataclasses.replace(core.state, pool=spoil(core.state.pool), proposer=spoil(core.state.proposer))


def ngram(num_tokens: int, min_n: int = 1, max_n: int = 3) -> dict:
    return {
        "method": "ngram",
        "num_speculative_tokens": num_tokens,
        "prompt_lookup_min": min_n,
        "prompt_lookup_max": max_n,
    }


def draft_model(num_tokens: int, model, sample_method: str = "greedy", **more) -> dict:
    return {
        "method": "draft_model",
        "num_speculative_tokens": num_tokens,
        "model": str(model),
        "draft_sample_method": sample_method,
    } | more


def custom(num_tokens: int, **more) -> dict:
    return {"method": "custom", "num_speculative_tokens": num_tokens} | more
