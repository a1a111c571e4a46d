"""Device. The rejection kernels as a TPU runs them (Pallas Mosaic): eight rows at a time, whole rows in VMEM.

Rows lie eight to a tile, and so they are worked on. A pass over all rows streams them in blocks as they lie; a pass
over chosen ones gathers eight, a copy of a row each, which is why the logits are never laid out anew. Either way a
program sweeps rows that are in VMEM, as often as it must. Penalties are paid once, on the way in.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxspec import shards
from jaxspec.pallas_kernels.rejection import sweeps
from jaxspec.pallas_kernels.rejection.passes import Draft, Pass, Target, Unpacked, columns_of, packed

_LANES = 1024  # entries of a row in one step: eight registers for eight rows
_ROWS = 8
_VMEM_BESIDES = 2**23  # bytes beside the rows
_ADDRESSES = ("row", "draft_row", "request", "start", "offset")  # what scalars must know; the rest travels as vectors


def run(
    which: Pass,
    *columns_X: jax.Array,
    target: Target | None = None,
    draft: Draft | None = None,
    interpret: Any = False,
) -> Any:
    """See `passes.Run`. interpret: bool, or `pltpu.InterpretParams`."""
    draft = None if draft is None else _with_whole_pairs(draft)
    costs = None if target is None else target.costs
    columns = columns_of(target, draft, columns_X)
    num_programs = columns_X[0].shape[0]

    # name: (the rows, the column that says which to gather; None: program x reads row x, streamed)
    sources: dict[str, tuple[jax.Array, str | None]] = {}
    if target is not None:
        sources["target"] = (target.logits_RV, None if target.rows_X is None else "row")
    if draft is not None:
        sources["draft"] = (draft.logits_NV, None if draft.rows_X is None else "draft_row")
    if costs is not None:
        sources["counts"] = (costs.counts_BV, "request")
    vocab_size = next(iter(sources.values()))[0].shape[1]
    num_rows = max(_packing(rows.dtype) if at is None else 1 for rows, at in sources.values()) * _ROWS

    prefetched = {name: _in_blocks(columns[name], num_rows) for name in _ADDRESSES if name in columns}
    if costs is not None:
        prefetched["draft_ids"] = costs.draft_token_ids_N
    scratch: dict[str, Any] = {
        name: pltpu.VMEM((num_rows * _packing(rows.dtype), vocab_size), rows.dtype)
        for name, (rows, at) in sources.items()
        if at is not None
    }
    if costs is not None:
        scratch["paid"] = pltpu.VMEM((num_rows, vocab_size), jnp.float32)
    dtypes, tree = jax.tree.flatten(which.dtypes)

    def kernel(*refs):
        # Prefetched: the addresses i32[X] each, and the drafts i32[N]
        # Inputs: columns i32[rows, C]; sources [rows, V] if streamed, [all rows, V] in HBM if gathered
        # Outputs: [rows, 1] each
        # Scratch: gathered sources [rows, V]; logits that have paid f32[rows, V]; a semaphore
        refs = iter(refs)
        scalars = {name: next(refs) for name in prefetched}
        columns_ref = next(refs)
        inputs = {name: next(refs) for name in sources}
        outputs = [next(refs) for _ in dtypes]
        held = inputs | {name: next(refs) for name in scratch}
        semaphore = next(refs)

        first = pl.program_id(0) * num_rows
        copies = [
            copy
            for name, (_, at) in sources.items()
            if at is not None
            for copy in _copies(inputs[name], held[name], scalars[at], first, num_rows, semaphore)
        ]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()
        column = Unpacked(
            {name: column.dtype for name, column in columns.items()},
            lambda place: columns_ref[:, place : place + 1],
        )
        parts = _parts(num_rows, vocab_size, column.first_id())
        if costs is not None:
            _pay(held, scalars, first, column, parts)
        logits_ref: Any = held.get("paid", held.get("target"))

        def target_tile(start: jax.Array, ids: jax.Array) -> jax.Array:
            x = sweeps.clean(logits_ref[:, pl.ds(start, ids.shape[1])], column["temperature"])
            return jnp.where(x >= column["cutoff"], x, -jnp.inf) if "cutoff" in columns else x

        def draft_tile(start: jax.Array, ids: jax.Array) -> jax.Array:
            y = held["draft"][:, pl.ds(start, ids.shape[1])]
            is_pair = sources["draft"][1] is not None and _packing(y.dtype) == 2
            return sweeps.clean(_half_of_pairs(y, column["draft_row"]) if is_pair else y)

        rows = sweeps.Rows(
            vocab_size, parts, None if target is None else target_tile, None if draft is None else draft_tile
        )
        results = jax.tree.leaves(which.compute(rows, *column.own()))
        for output, result in zip(outputs, results, strict=True):
            output[:] = result

    def block(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((num_rows, width), lambda i, *_: (i, 0))

    all_rows = [rows for rows, _ in sources.values()]
    row_bytes = sum(
        num_rows * vocab_size * (rows.dtype.itemsize * 2 if at is None else 4) for rows, at in sources.values()
    )
    row_bytes += 0 if costs is None else num_rows * vocab_size * 4
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(pl.cdiv(num_programs, num_rows),),
            in_specs=[
                block(len(columns)),
                *(block(vocab_size) if at is None else pl.BlockSpec(memory_space=pl.ANY) for _, at in sources.values()),
            ],
            out_specs=[block(1)] * len(dtypes),
            scratch_shapes=[*scratch.values(), pltpu.SemaphoreType.DMA(())],
        ),
        out_shape=[shards.result((num_programs, 1), dtype, *all_rows) for dtype in dtypes],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=row_bytes + _VMEM_BESIDES
        ),
        interpret=interpret,
        name=which.name,
    )

    def work() -> Any:
        found = call(*prefetched.values(), packed(columns), *all_rows)
        return tree.unflatten([one[:, 0] for one in found])

    if which.works is None:
        return work()
    # A block is brought to VMEM before it can say that it has nothing to do; so all of them are asked here.
    idle = tree.unflatten([jnp.full((num_programs,), which.idle, dtype) for dtype in dtypes])
    return lax.cond(jnp.any(which.works(*columns_X)), work, lambda: shards.split_like(idle, *all_rows))


def _packing(dtype: Any) -> int:
    """How many rows share the words of a register."""
    return 4 // jnp.dtype(dtype).itemsize


def _with_whole_pairs(draft: Draft) -> Draft:
    """In a form that rows can be copied of: 32-bit, or bfloat16 in whole pairs of rows, which share their words."""
    logits_NV = draft.logits_NV
    if logits_NV.dtype not in (jnp.float32, jnp.bfloat16):
        logits_NV = logits_NV.astype(jnp.float32)
    if draft.rows_X is not None and _packing(logits_NV.dtype) == 2 and logits_NV.shape[0] % 2:
        logits_NV = jnp.pad(logits_NV, ((0, 1), (0, 0)))
    return Draft(logits_NV, draft.rows_X)


def _in_blocks(address_X: jax.Array, num_rows: int) -> jax.Array:
    """Addresses of whole blocks of programs; those past the last read row 0, and nobody reads what they say."""
    return jnp.pad(address_X, (0, -address_X.shape[0] % num_rows))


def _copies(source_ref, held_ref, address_ref, first: jax.Array, num_rows: int, semaphore) -> Iterator[Any]:
    """Copies of each program's row, or of the pair that it is in."""
    together = _packing(source_ref.dtype)
    for place in range(num_rows):
        row = address_ref[first + place]
        if together > 1:
            row = pl.multiple_of(row // together * together, together)
        yield pltpu.make_async_copy(
            source_ref.at[pl.ds(row, together)], held_ref.at[pl.ds(place * together, together)], semaphore
        )


def _half_of_pairs(pairs: jax.Array, row: jax.Array) -> jax.Array:
    """bfloat16[2 * rows, lanes] -> f32[rows, lanes]: the odd or the even row of each pair, as `row` is."""
    words = pltpu.bitcast(pairs, jnp.int32)
    is_odd = (row & 1) != 0
    return lax.bitcast_convert_type(jnp.where(is_odd, words & jnp.int32(-65536), words << 16), jnp.float32)


def _parts(num_rows: int, vocab_size: int, first_id: jax.Array | int) -> tuple[sweeps.Part, ...]:
    """Whole tiles in a loop, and what remains of the vocabulary as a tile of its own. first_id: of the rows' entries,
    which visits are told; tiles are read by their place."""
    num_tiles, rest = divmod(vocab_size, _LANES)

    def ids(start: jax.Array | int, lanes: int) -> jax.Array:
        return start + lax.broadcasted_iota(jnp.int32, (1, lanes), 1)

    def sweep(tile, visit, carry):
        def step(t, carry):
            start = pl.multiple_of(t * _LANES, _LANES)
            return visit(carry, tile(start, ids(start, _LANES)), ids(start, _LANES) + first_id)

        return lax.fori_loop(0, num_tiles, step, carry)

    def sweep_rest(tile, visit, carry):
        start = num_tiles * _LANES
        return visit(carry, tile(start, ids(start, rest)), ids(start, rest) + first_id)

    whole = (sweeps.Part((num_rows, _LANES), sweep),) if num_tiles else ()
    return whole + ((sweeps.Part((num_rows, rest), sweep_rest),) if rest else ())


def _pay(held, scalars, first: jax.Array, column: Unpacked, parts: tuple[sweeps.Part, ...]) -> None:
    """Fills held["paid"] with the rows' logits, penalised."""
    num_rows = parts[0].shape[0]
    place_of = lax.broadcasted_iota(jnp.int32, (num_rows, 1), 0)
    offsets = [scalars["offset"][first + place] for place in range(num_rows)]
    longest = offsets[0]
    for offset in offsets[1:]:
        longest = jnp.maximum(longest, offset)

    def pay(start: jax.Array, ids: jax.Array) -> jax.Array:
        at = (slice(None), pl.ds(start, ids.shape[1]))

        def count(draft: jax.Array, counts: jax.Array) -> jax.Array:
            drafted = jnp.full((num_rows, 1), -1, jnp.int32)
            for place, offset in enumerate(offsets):
                index = jnp.minimum(scalars["start"][first + place] + draft, scalars["draft_ids"].shape[0] - 1)
                id = jnp.where(draft < offset, scalars["draft_ids"][index], -1)
                drafted = jnp.where(place_of == place, id, drafted)
            return counts + jnp.where(ids == drafted, jnp.int32(1), jnp.int32(0))

        counts = lax.fori_loop(0, longest, count, held["counts"][at])
        x = sweeps.penalise(held["target"][at], counts, column["presence"], column["frequency"], column["repetition"])
        held["paid"][at] = x
        return x

    for part in parts:
        part.sweep(pay, lambda carry, x, ids: carry, jnp.int32(0))
