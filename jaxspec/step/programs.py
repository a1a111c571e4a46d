"""Host. Compiles every program for every bucket before the engine is ready, and runs them; nothing compiles later."""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec.proposers.base import Proposer
from jaxspec.sampling.edit_table import edit_row, mask_words
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.table import table_row
from jaxspec.step import pack, rounds
from jaxspec.step.compiles import cache_hits, compile_count
from jaxspec.step.executables import ExecutableStore, KeptProgram, temp_bytes
from jaxspec.step.prefill import Admission, Chunk, admit, prefill, prompt_logprobs
from jaxspec.step.spread import Role, Spread
from jaxspec.step.state import Batch, DecodeState, RoundOutput
from jaxspec.step.target import Target
from jaxspec.types import Drafts, TokenLogprobs

logger = logging.getLogger(__name__)

SCORED_TOKENS = 16  # of a prompt, whose logits are made at once


@dataclass(frozen=True)
class Shapes:
    """The buckets a plan compiles for.

    batch_rows, chunk_tokens: ascending buckets; max_rows: rows of the table (the guard row comes on top);
    max_rounds: rounds before the host looks; num_host_drafts: K where drafts come from the host, between the two
    halves of a round, else 0, fewer being padded to the next of a short menu; split_rows: the batch buckets whose
    rounds can also be run in three parts, for a host that edits logits in between; none where it never does.
    widths: for each of batch_rows the numbers of drafts a row that its rounds can verify, ascending, if not 0 and K;
    num_weighed: K where rounds weigh their drafts, else 0.
    """

    batch_rows: tuple[int, ...]
    split_rows: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    pages_per_row: int
    max_rows: int
    max_model_len: int
    max_rounds: int
    num_host_drafts: int
    widths: tuple[tuple[int, ...], ...] = ()
    num_weighed: int = 0

    def widths_of(self, rows: int) -> tuple[int, ...] | None:
        """The widths that rounds of this batch bucket can take; None: none and all drafts."""
        return self.widths[self.batch_rows.index(rows)] if self.widths else None

    @property
    def host_drafts(self) -> tuple[int, ...]:
        """The numbers of drafts that rounds with host drafts are compiled for, ascending: none, a few, all."""
        sizes = [self.num_host_drafts]
        while sizes[-1] > 2 and len(sizes) < 3:
            sizes.append(-(-sizes[-1] // 4))
        return (0, *reversed(sizes))

    @property
    def guard_row(self) -> int:
        """The row that pads a batch: the table's last, which no request holds."""
        return self.max_rows


@dataclass(frozen=True)
class PlanEntry:
    """One compiled program: its name with its bucket, how long it took, the bytes of scratch it needs, and whether it
    was kept from a former start."""

    name: str
    compile_seconds: float
    temp_bytes: int
    was_kept: bool = False


class Programs:
    """The compiled programs of one engine. Calls take the state donated and return the new one.

    The outputs of rounds have an axis of rounds in front, of size one where there is one. Where the devices form
    groups, what a call takes and gives is joined of theirs (`spread.join`), but for the weights.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        shapes: Shapes,
        weights: Any,
        state: DecodeState,
        *,
        spread: Spread | None = None,
        store: ExecutableStore | None = None,
        show_progress: bool = False,
    ):
        """Compile everything, or take it from the store. `weights` and `state` are only looked at for their shapes.

        spread: where they lie; by default on one device.
        """
        compile_count()  # counting begins
        self.shapes = shapes
        self.spread = spread or Spread()
        self.runner: Callable[[str, Any, tuple[Any, ...]], Any] | None = None  # who runs (name, program, args), if set
        self._programs: dict[str, Any] = {}
        self.plan: list[PlanEntry] = []
        wanted = dict(_program_list(target, proposer, shapes, weights, state, self.spread))
        started = time.perf_counter()
        if store is not None:
            store.settle((weights, state))
        # XLA compiles outside the interpreter's lock, so two at a time use the second core.
        with ThreadPoolExecutor(max_workers=2) as pool:
            done = pool.map(functools.partial(_obtain, store), wanted.items())
            for program, entry in tqdm(
                done, total=len(wanted), desc="compiling", disable=not show_progress, unit="program"
            ):
                self._programs[entry.name] = program
                self.plan.append(entry)
        if store is not None:
            store.close()
        self.compile_seconds = time.perf_counter() - started

    def admit(self, state: DecodeState, admission: Admission) -> DecodeState:
        """Set a request's row."""
        return self._run("admit", state, admission)

    def prefill(self, weights: Any, state: DecodeState, chunk: Chunk) -> tuple[DecodeState, jax.Array]:
        """Fill the caches with a chunk of at most the largest bucket's tokens; also its hidden states [1, T, D]."""
        bucket = pack.bucket_of(int(np.max(chunk.num_tokens)), self.shapes.chunk_tokens)
        return self._run(f"prefill[T={bucket}]", weights, state, chunk)

    def prompt_logprobs(
        self, weights: Any, hidden_1TD: jax.Array, group: int, first: int, token_ids: Sequence[int]
    ) -> TokenLogprobs:
        """Of the tokens that follow those of a group's chunk from its `first` on, from what `prefill` gave; in numpy,
        axes [1, len(token_ids)]."""
        if self.spread.has_far_groups:
            hidden_1TD = self._run(f"gather[T={hidden_1TD.shape[-2]}]", hidden_1TD)
        hidden_TD, pieces = np.asarray(self.spread.part(hidden_1TD, group))[0, first:], []
        for start in range(0, len(token_ids), SCORED_TOKENS):
            ids_1T = np.zeros((1, SCORED_TOKENS), np.int32)
            hidden = np.zeros((1, SCORED_TOKENS, hidden_TD.shape[1]), hidden_TD.dtype)
            size = min(SCORED_TOKENS, len(token_ids) - start)
            ids_1T[0, :size], hidden[0, :size] = token_ids[start : start + size], hidden_TD[start : start + size]
            scored = self._run("prompt_logprobs", weights, *map(self.spread.same, (hidden, ids_1T)))
            own = self.spread.part(scored, 0)
            pieces.append(jax.tree.map(lambda leaf, size=size: np.asarray(leaf)[:, :size], own))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *pieces)

    def decode_rounds(
        self, weights: Any, state: DecodeState, batch: Batch, num_rounds: int
    ) -> tuple[DecodeState, RoundOutput]:
        """Whole rounds, at most `num_rounds` and the shapes' max_rounds; drafts come from the device."""
        name = f"decode_rounds[B={batch.rows_B.shape[-1]}]"
        return self._run(name, weights, state, batch, self.spread.same(np.int32(num_rounds)))

    def verify_commit(
        self, weights: Any, state: DecodeState, batch: Batch, drafts: Drafts
    ) -> tuple[DecodeState, RoundOutput]:
        """The second half alone, for drafts from the host; with K = 0 drafts it is plain decoding."""
        K = drafts.token_ids_BK.shape[-1]
        return self._run(f"verify_commit[B={batch.rows_B.shape[-1]},K={K}]", weights, state, batch, drafts)

    def propose(self, weights: Any, state: DecodeState, batch: Batch) -> tuple[Drafts, DecodeState]:
        """The first of a round's three parts; for the batch buckets of `split_rows`, like the others."""
        return self._run(f"propose[B={batch.rows_B.shape[-1]}]", weights, state, batch)

    def forward(
        self, weights: Any, state: DecodeState, batch: Batch, drafts: Drafts
    ) -> tuple[DecodeState, jax.Array, jax.Array | None]:
        """The second part: raw logits_BJV, which the host may edit, and what the third part hands to the proposer."""
        return self._run(f"forward[B={batch.rows_B.shape[-1]}]", weights, state, batch, drafts)

    def judge_commit(
        self,
        state: DecodeState,
        batch: Batch,
        drafts: Drafts,
        logits_BJV: Any,
        seen_BJX: jax.Array | None,
        mask_BJU: np.ndarray,
    ) -> tuple[DecodeState, RoundOutput]:
        """The third part."""
        name = f"judge_commit[B={batch.rows_B.shape[-1]}]"
        return self._run(name, state, batch, drafts, logits_BJV, seen_BJX, mask_BJU)

    def _run(self, name: str, *args: Any) -> Any:
        program = self._programs[name]
        return program(*args) if self.runner is None else self.runner(name, program, args)

    def compiled(self, name: str) -> Any:
        """A compiled program by its plan name, for benchmarks and for reading its HLO."""
        program = self._programs[name]
        return program.program if isinstance(program, KeptProgram) else program


def is_first(name: str) -> bool:
    """Whether a first request, alone, needs the program of this name."""
    return name.startswith(("admit", "prefill", "decode_rounds[B=1]", "verify_commit[B=1,"))


def no_admission(target: Target, shapes: Shapes) -> Admission:
    """What a group is handed that admits nobody: its row lies behind the table, where nothing is written."""
    return pack.pack_admission(
        row=shapes.guard_row + 1,
        token_ids=[],
        num_prompt_tokens=0,
        max_model_len=shapes.max_model_len,
        min_len=0,
        max_len=0,
        max_drafts=None,
        wants_logprobs=False,
        stop_ids=[],
        sampling=table_row(SamplingParams(), np.zeros(2, np.uint32)),
        edits=edit_row(SamplingParams(), (), target.config.vocab_size, target.processors),
    )


def no_chunk(shapes: Shapes) -> Chunk:
    """What a group is handed that prefills nothing."""
    return pack.pack_chunk(shapes.guard_row, 0, 0, [], shapes.pages_per_row)


def _program_list(target: Target, proposer: Proposer, shapes: Shapes, weights: Any, state: DecodeState, spread: Spread):
    """Yields (name, lowering function) for every program and bucket; nothing is traced before it is lowered."""
    weights, state = spread.abstract(weights, "weights"), spread.abstract(state, "state")

    def lower(function: Callable, roles: Sequence[Role], results: Role | Sequence[Role], *args) -> Callable:
        """The state is donated."""
        donate = tuple(at for at, role in enumerate(roles) if role == "state")
        return lambda: spread.jit(function, roles, results, donate=donate).lower(*args)

    ours: tuple[Role, ...] = ("weights", "state", "small")
    rounds_out: tuple[Role, ...] = ("state", "small")

    admission = spread.shapes(no_admission(target, shapes))
    yield "admit", lower(functools.partial(admit, proposer), ("state", "small"), "state", state, admission)

    chunk = spread.shapes(no_chunk(shapes))
    for tokens in shapes.chunk_tokens:
        run = functools.partial(prefill, target, proposer, tokens)
        yield f"prefill[T={tokens}]", lower(run, ours, ("state", "held"), weights, state, chunk)
        if spread.has_far_groups:
            hidden_1TD = spread.shapes(jax.ShapeDtypeStruct((1, tokens, target.config.hidden_size), jnp.float32))
            yield f"gather[T={tokens}]", lower(lambda hidden: hidden, ("held",), "small", hidden_1TD)
    hidden_1TD = spread.shapes(jax.ShapeDtypeStruct((1, SCORED_TOKENS, target.config.hidden_size), jnp.float32))
    ids_1T = spread.shapes(jax.ShapeDtypeStruct((1, SCORED_TOKENS), jnp.int32))
    run = functools.partial(prompt_logprobs, target)
    yield "prompt_logprobs", lower(run, ("weights", "small", "small"), "small", weights, hidden_1TD, ids_1T)

    def drafts_of(rows: int, K: int) -> Drafts:
        return spread.shapes(
            Drafts(
                token_ids_BK=jax.ShapeDtypeStruct((rows, K), jnp.int32),  # pyright: ignore[reportArgumentType]
                counts_B=jax.ShapeDtypeStruct((rows,), jnp.int32),  # pyright: ignore[reportArgumentType]
            )
        )

    def batch_of(rows: int) -> Batch:
        survival = seconds = None
        if shapes.num_weighed:
            survival = np.zeros((0, shapes.num_weighed), np.float32)
            seconds = np.zeros(len(shapes.widths_of(rows) or (0, shapes.num_weighed)), np.float32)
        return spread.shapes(
            pack.pack_batch([], [], rows, shapes.guard_row, shapes.pages_per_row, survival=survival, seconds=seconds)
        )

    for rows in shapes.batch_rows:
        batch = batch_of(rows)
        if not shapes.num_host_drafts:
            widths = shapes.widths_of(rows)
            run = functools.partial(rounds.decode_rounds, target, proposer, shapes.max_rounds, widths=widths)
            yield (
                f"decode_rounds[B={rows}]",
                lower(run, (*ours, "small"), rounds_out, weights, state, batch, spread.shapes(np.int32(0))),
            )
            continue
        run = stacked(functools.partial(rounds.verify_commit, target, proposer))
        for K in shapes.host_drafts:
            yield (
                f"verify_commit[B={rows},K={K}]",
                lower(run, (*ours, "drafts"), rounds_out, weights, state, batch, drafts_of(rows, K)),
            )

    propose = spread.jit(functools.partial(rounds.propose, proposer), ours, ("drafts", "state"), donate=1)
    forward = spread.jit(
        functools.partial(rounds.forward, target, proposer),
        (*ours, "drafts"),
        ("state", "logits", "held"),
        donate=1,
    )

    def split_arguments(rows: int) -> tuple[Batch, Drafts, jax.Array, jax.Array | None]:
        batch, drafts = batch_of(rows), drafts_of(rows, shapes.num_host_drafts)
        if not shapes.num_host_drafts:
            drafts, _ = jax.eval_shape(propose, weights, state, batch)
        _, logits_BJV, seen_BJX = jax.eval_shape(forward, weights, state, batch, drafts)
        return batch, drafts, logits_BJV, seen_BJX

    def lower_forward(rows: int):
        batch, drafts, _, _ = split_arguments(rows)
        return forward.lower(weights, state, batch, drafts)

    def lower_judge_commit(rows: int):
        batch, drafts, logits_BJV, seen_BJX = split_arguments(rows)
        mask_BJU = np.zeros((*logits_BJV.shape[:-1], mask_words(target.config.vocab_size)), np.uint32)
        run = stacked(functools.partial(rounds.judge_commit, target, proposer))
        roles: tuple[Role, ...] = ("state", "small", "drafts", "logits", "held", "small")
        return lower(run, roles, rounds_out, state, batch, drafts, logits_BJV, seen_BJX, mask_BJU)()

    for rows in shapes.split_rows:
        if not shapes.num_host_drafts:
            yield f"propose[B={rows}]", functools.partial(propose.lower, weights, state, batch_of(rows))
        yield f"forward[B={rows}]", functools.partial(lower_forward, rows)
        yield f"judge_commit[B={rows}]", functools.partial(lower_judge_commit, rows)


def stacked(round_: Callable) -> Callable:
    """One round in the form of many: outputs have an axis of rounds in front."""

    def run(*args) -> tuple[DecodeState, RoundOutput]:
        state, output = round_(*args)
        return state, jax.tree.map(lambda leaf: leaf[None], output)

    return run


def _obtain(store: ExecutableStore | None, item: tuple[str, Callable]) -> tuple[Any, PlanEntry]:
    """The program of a (name, lowering function), from the store; if it is not there, compiled and put there."""
    (name, lower), started = item, time.perf_counter()
    kept = store.load(name) if store is not None else None
    if kept is not None:
        kept.compile = lambda: _compile(lower())
        return kept, PlanEntry(name, time.perf_counter() - started, kept.temp_bytes, was_kept=True)
    lowered = lower()
    hits = cache_hits()
    program = _compile(lowered)
    # A program that XLA has read from JAX's cache lacks, written once more, the code that its loading had taken apart.
    if store is not None and cache_hits() == hits:
        store.save(name, program)
    return program, PlanEntry(name, time.perf_counter() - started, temp_bytes(program))


def _compile(lowered: Any) -> Any:
    return lowered.compile()
