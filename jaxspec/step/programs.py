"""Host. Compiles every program for every bucket before the engine is ready, and runs them; nothing compiles later."""

import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec.proposers.base import Proposer
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.table import table_row
from jaxspec.step import pack, rounds
from jaxspec.step.compiles import compile_count
from jaxspec.step.prefill import Admission, Chunk, admit, prefill
from jaxspec.step.rounds import Target
from jaxspec.step.state import Batch, DecodeState, RoundOutput
from jaxspec.types import Drafts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shapes:
    """The buckets a plan compiles for.

    batch_rows, chunk_tokens: ascending buckets; max_rows: rows of the table (the guard row comes on top);
    max_rounds: rounds before the host looks; num_host_drafts: K where drafts come from the host, between the two
    halves of a round, else 0.
    """

    batch_rows: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    pages_per_row: int
    max_rows: int
    max_model_len: int
    max_rounds: int
    num_host_drafts: int

    @property
    def guard_row(self) -> int:
        """The row that pads a batch: the table's last, which no request holds."""
        return self.max_rows


@dataclass(frozen=True)
class PlanEntry:
    """One compiled program: its name with its bucket, how long it took, and the bytes of scratch it needs."""

    name: str
    compile_seconds: float
    temp_bytes: int


class Programs:
    """The compiled programs of one engine. Calls take the state donated and return the new one."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        shapes: Shapes,
        weights: Any,
        state: DecodeState,
        *,
        show_progress: bool = False,
    ):
        """Lower and compile everything. `state` is only looked at for its shapes."""
        compile_count()  # counting begins
        self.shapes = shapes
        self._programs: dict[str, Any] = {}
        self.plan: list[PlanEntry] = []
        wanted = dict(_program_list(target, proposer, shapes, weights, state))
        started = time.perf_counter()
        # XLA compiles outside the interpreter's lock, so two at a time use the second core.
        with ThreadPoolExecutor(max_workers=2) as pool:
            done = pool.map(_compile, wanted.items())
            for name, program, seconds in tqdm(
                done, total=len(wanted), desc="compiling", disable=not show_progress, unit="program"
            ):
                self._programs[name] = program
                self.plan.append(PlanEntry(name, seconds, _temp_bytes(program)))
        self.compile_seconds = time.perf_counter() - started

    def admit(self, state: DecodeState, admission: Admission) -> DecodeState:
        """Set a request's row."""
        return self._programs["admit"](state, admission)

    def prefill(self, weights: Any, state: DecodeState, chunk: Chunk) -> DecodeState:
        """Fill the caches with a chunk of at most the largest bucket's tokens."""
        bucket = pack.bucket_of(int(chunk.num_tokens), self.shapes.chunk_tokens)
        return self._programs[f"prefill[T={bucket}]"](weights, state, chunk)

    def decode_rounds(
        self, weights: Any, state: DecodeState, batch: Batch, num_rounds: int
    ) -> tuple[DecodeState, RoundOutput]:
        """Whole rounds, at most `num_rounds` and the shapes' max_rounds; drafts come from the device."""
        name = f"decode_rounds[B={batch.rows_B.shape[0]}]"
        return self._programs[name](weights, state, batch, np.int32(num_rounds))

    def verify_commit(
        self, weights: Any, state: DecodeState, batch: Batch, drafts: Drafts
    ) -> tuple[DecodeState, RoundOutput]:
        """The second half alone, for drafts from the host; with K = 0 drafts it is plain decoding."""
        K = drafts.token_ids_BK.shape[1]
        return self._programs[f"verify_commit[B={batch.rows_B.shape[0]},K={K}]"](weights, state, batch, drafts)

    def compiled(self, name: str) -> Any:
        """A compiled program by its plan name, for benchmarks and for reading its HLO."""
        return self._programs[name]


def _program_list(target: Target, proposer: Proposer, shapes: Shapes, weights: Any, state: DecodeState):
    """Yields (name, lowering function) for every program and bucket."""
    abstract = functools.partial(jax.tree.map, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    weights, state = abstract(weights), abstract(state)

    def lower(function: Callable, donate: int, *args) -> Callable:
        return lambda: jax.jit(function, donate_argnums=donate).lower(*args)

    admission = pack.pack_admission(
        row=0,
        prompt_token_ids=[],
        max_model_len=shapes.max_model_len,
        min_len=0,
        max_len=0,
        stop_ids=[],
        sampling=table_row(SamplingParams(), np.zeros(2, np.uint32)),
    )
    yield "admit", lower(admit, 0, state, admission)

    chunk = pack.pack_chunk(0, 0, 0, [], shapes.pages_per_row)
    for tokens in shapes.chunk_tokens:
        run = functools.partial(prefill, target, proposer, tokens)
        yield f"prefill[T={tokens}]", lower(run, 1, weights, state, chunk)

    for rows in shapes.batch_rows:
        batch = pack.pack_batch([], [], rows, shapes.guard_row, shapes.pages_per_row)
        if not shapes.num_host_drafts:
            run = functools.partial(rounds.decode_rounds, target, proposer, shapes.max_rounds)
            yield f"decode_rounds[B={rows}]", lower(run, 1, weights, state, batch, np.int32(0))
            continue
        run = functools.partial(rounds.verify_commit, target)
        for K in (0, shapes.num_host_drafts):
            drafts = Drafts(
                token_ids_BK=jax.ShapeDtypeStruct((rows, K), jnp.int32),  # pyright: ignore[reportArgumentType]
                counts_B=jax.ShapeDtypeStruct((rows,), jnp.int32),  # pyright: ignore[reportArgumentType]
            )
            yield f"verify_commit[B={rows},K={K}]", lower(run, 1, weights, state, batch, drafts)


def _compile(item: tuple[str, Callable]) -> tuple[str, Any, float]:
    name, lower = item
    started = time.perf_counter()
    program = lower().compile()
    return name, program, time.perf_counter() - started


def _temp_bytes(program: Any) -> int:
    analysis = program.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)
