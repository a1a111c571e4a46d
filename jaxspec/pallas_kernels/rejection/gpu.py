"""Device. The rejection kernels as a GPU runs them (Pallas Triton): a program a row and shard of the vocabulary.

A program walks its shard in tiles, and what the shards of a row found is joined by plain arithmetic. A cutoff needs
the whole row at every halving, so there one program walks all of it, and finds it in the L2 cache. Which row a
program reads is data: it looks it up, so logits are read in place.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxspec import shards
from jaxspec.pallas_kernels.rejection import sweeps
from jaxspec.pallas_kernels.rejection.passes import Draft, Pass, Target, Unpacked, columns_of, packed

_LANES = 2048  # entries of a tile; a power of two, as Triton wants it
_SHARD_TILES = 8
_NUM_WARPS = 4  # a power of two too: anything else aborts the process


def run(
    which: Pass,
    *columns_X: jax.Array,
    target: Target | None = None,
    draft: Draft | None = None,
    interpret: bool = False,
) -> Any:
    """See `passes.Run`."""
    columns = columns_of(target, draft, columns_X)
    operands = _operands(target, draft)
    num_programs, vocab_size = columns_X[0].shape[0], operands[0].shape[1]
    lanes = min(_LANES, pl.next_power_of_2(vocab_size))
    assert all(size & (size - 1) == 0 for size in (lanes, _NUM_WARPS)), "Triton takes powers of two alone"
    num_tiles = pl.cdiv(vocab_size, lanes)
    if which.merge is not None:
        num_tiles = min(num_tiles, _SHARD_TILES)
    num_shards = pl.cdiv(vocab_size, num_tiles * lanes)
    dtypes, tree = jax.tree.flatten(which.dtypes)

    def kernel(
        # Inputs
        columns_ref,  # i32[X, C]
        *refs,  # the operands, whole, in the order of `_operands`; then the outputs, [X, shards] each
    ):
        x, shard = pl.program_id(0), pl.program_id(1)

        def sweep(tile, visit, carry):
            def step(t, carry):
                start = (shard * num_tiles + t) * lanes
                ids = start + lax.broadcasted_iota(jnp.int32, (1, lanes), 1)
                return visit(carry, tile(start, ids), ids + unpacked.first_id())

            return lax.fori_loop(0, num_tiles, step, carry)

        unpacked = Unpacked(
            {name: column.dtype for name, column in columns.items()},
            lambda place: plgpu.load(columns_ref.at[pl.ds(x, 1), pl.ds(place, 1)]),
        )
        parts = (sweeps.Part((1, lanes), sweep),)
        rows = sweeps.Rows(vocab_size, parts, *_tiles(target, draft, unpacked, columns_ref, x, refs))
        results = jax.tree.leaves(which.compute(rows, *unpacked.own()))
        for output, result in zip(refs[len(operands) :], results, strict=True):
            plgpu.store(output.at[pl.ds(x, 1), pl.ds(shard, 1)], result)

    found = pl.pallas_call(
        kernel,
        grid=(num_programs, num_shards),
        out_shape=[shards.result((num_programs, num_shards), dtype, *operands) for dtype in dtypes],
        compiler_params=plgpu.CompilerParams(num_warps=_NUM_WARPS),
        interpret=interpret,
        name=which.name,
    )(packed(columns), *operands)
    parts = [tree.unflatten([one[:, shard] for one in found]) for shard in range(num_shards)]
    return parts[0] if which.merge is None else functools.reduce(which.merge, parts)


def _operands(target: Target | None, draft: Draft | None) -> list[jax.Array]:
    operands = [] if target is None else [target.logits_RV]
    operands += [] if draft is None else [draft.logits_NV]
    if target is not None and target.costs is not None:
        operands += [target.costs.counts_BV, target.costs.draft_token_ids_N]
    return operands


def _tiles(
    target: Target | None, draft: Draft | None, column: Unpacked, columns_ref, x: jax.Array, refs
) -> tuple[sweeps.Tile | None, sweeps.Tile | None]:
    """How a program reads its rows of target and drafter."""
    names = list(column.dtypes)

    def scalar(name: str) -> jax.Array:
        return columns_ref[x, names.index(name)]

    def target_tile(start: jax.Array, ids: jax.Array) -> jax.Array:
        assert target is not None
        x = _read(refs[0], scalar("row"), start, ids, -jnp.inf)
        if target.costs is not None:
            counts_ref, draft_ids_ref = refs[1:3] if draft is None else refs[2:4]
            first = scalar("start")

            def count(place: jax.Array, counts: jax.Array) -> jax.Array:
                return counts + jnp.where(ids == draft_ids_ref[first + place], jnp.int32(1), jnp.int32(0))

            counts = lax.fori_loop(0, scalar("offset"), count, _read(counts_ref, scalar("request"), start, ids, 0))
            x = sweeps.penalise(x, counts, column["presence"], column["frequency"], column["repetition"])
            x = jnp.where(ids < refs[0].shape[1], x, -jnp.inf)
        x = sweeps.clean(x, column["temperature"])
        return x if target.cutoff_X is None else jnp.where(x >= column["cutoff"], x, -jnp.inf)

    def draft_tile(start: jax.Array, ids: jax.Array) -> jax.Array:
        return sweeps.clean(_read(refs[0 if target is None else 1], scalar("draft_row"), start, ids, -jnp.inf))

    return None if target is None else target_tile, None if draft is None else draft_tile


def _read(ref, row: jax.Array, start: jax.Array, ids: jax.Array, nothing: float) -> jax.Array:
    """A row's entries from start on; `nothing` past its end."""
    others = jnp.full(ids.shape, nothing, ref.dtype)
    return plgpu.load(ref.at[pl.ds(row, 1), pl.ds(start, ids.shape[1])], mask=ids < ref.shape[1], other=others)
