"""Device. What the compiled round must not hold: a callback, or a copy of anything large."""

import functools
import math

import jax
import pytest

from jaxspec.step import pack, rounds
from jaxspec.types import ArraySpec
from tests.lossless.engines import SAME_HLO, draft_model, make_engine, ngram
from tests.oracle.folders import write_llama
from tests.oracle.head_folders import write_eagle
from tests.oracle.hlo import large_moves
from tests.quick import heavy_but

# Sizes that no activation has: every weight's count of elements holds the prime 11, the pool's 23.
VOCAB, HIDDEN, FFN, NUM_PAGES, PAGE_SIZE = 61, 44, 52, 23, 4
K, MAX_LEN, CHUNK = 3, 40, 12
CALLBACKS = ("callback", "infeed", "outfeed")


# method: rows of the batches compiled for it. A lone row goes ways of its own; two rows of pairs of states would have a
# weight's size.
METHODS = {
    "plain": (1, 2), "ngram+self": (1, 2), "draft_model, four rounds": (1,), "probabilistic": (2,), "eagle3": (1,),
}  # fmt: skip


@pytest.fixture(scope="module", params=heavy_but(METHODS, lambda name: name == "eagle3"))
def engine(request, tmp_path_factory):
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN}
    target = write_llama(tmp_path_factory.mktemp("hlo") / "target", seed=1, **sizes)
    head = write_eagle(
        target.parent / "head", "eagle3", streams=(0, 1, 2), vocab_size=VOCAB, hidden_size=HIDDEN, draft_vocab_size=33
    )
    config = {
        "plain": None,
        "eagle3": {"model": str(head), "num_speculative_tokens": K},
        "ngram+self": ngram(K) | {"method": "ngram+self"},
        "draft_model, four rounds": draft_model(K, target),
        "probabilistic": draft_model(K, target, "probabilistic"),
    }[request.param]
    rows = METHODS[request.param]
    return make_engine(
        target,
        config,
        dtype="bfloat16",
        max_num_seqs=rows[-1],
        max_model_len=MAX_LEN,
        block_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_num_batched_tokens=CHUNK,
        rounds_per_batch=4 if "four rounds" in request.param else 1,
        buckets=len(rows) > 1,
        options=SAME_HLO,
    )


def round_programs(engine):
    programs = engine.core.parts.programs
    return {rows: programs.compiled(f"decode_rounds[B={rows}]") for rows in programs.shapes.batch_rows}


def large_sizes(engine):
    """{number of elements: what has it} of the pools and weights."""
    parts = engine.core.parts
    specs = parts.target.family.specs(parts.target.config, "bfloat16")
    leaves = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, ArraySpec))
    sizes = {math.prod(spec.shape): "a weight" for spec in leaves if len(spec.shape) > 1}
    sizes[engine.core.state.pool.size] = "the page pool"
    pools = [leaf for leaf in jax.tree.leaves(engine.core.state.proposer) if leaf.ndim == 4]
    sizes |= {pool.size: "the drafter's page pool" for pool in pools}
    assert all(size % 11 == 0 or size % 23 == 0 for size in sizes)
    return sizes


def test_a_round_copies_neither_pool_nor_weight(engine):
    for program in round_programs(engine).values():
        assert large_moves(program.as_text(), large_sizes(engine)) == []


@pytest.mark.parametrize("name", ["admit", f"prefill[T={CHUNK}]"])
def test_bringing_a_request_in_copies_neither(engine, name):
    program = engine.core.parts.programs.compiled(name)
    assert large_moves(program.as_text(), large_sizes(engine)) == []


def test_the_whole_state_is_updated_in_place(engine):
    """Donated: every output of the state's shares its input's memory."""
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.core.state))
    programs = [engine.core.parts.programs.compiled(name) for name in ("admit", f"prefill[T={CHUNK}]")]
    for program in (*programs, *round_programs(engine).values()):
        assert program.memory_analysis().alias_size_in_bytes == state_bytes


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda leaf: isinstance(leaf, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr),
        ):
            if isinstance(inner, jax.extend.core.ClosedJaxpr):
                yield from primitives(inner.jaxpr)
            elif isinstance(inner, jax.extend.core.Jaxpr):
                yield from primitives(inner)


def test_no_host_is_asked_inside_a_round(engine):
    parts = engine.core.parts
    shapes = parts.programs.shapes
    batch = pack.pack_batch([], [], 1, shapes.guard_row, shapes.pages_per_row)
    run = functools.partial(rounds.decode_rounds, parts.target, parts.proposer, shapes.max_rounds)
    jaxpr = jax.make_jaxpr(run)(parts.weights, engine.core.state, batch, 1)
    names = set(primitives(jaxpr.jaxpr))
    assert {"dot_general", "gather", "while"} <= names, "the walk must reach the layers"
    assert not [name for name in names if any(word in name for word in CALLBACKS)]
    assert all("callback" not in program.as_text() for program in round_programs(engine).values())


def test_the_walks_find_what_they_look_for():
    """Faults of each kind: a callback under a cond in a loop, a weight cast, a pool copied."""

    def faulty(x):
        return jax.lax.while_loop(
            lambda c: c[0] < 3,
            lambda c: (
                c[0] + 1,
                jax.lax.cond(c[0] > 1, lambda y: jax.pure_callback(lambda z: z, y, y), lambda y: y, c[1]),
            ),
            (0, x),
        )

    names = set(primitives(jax.make_jaxpr(faulty)(jax.numpy.zeros(3)).jaxpr))
    assert any("callback" in name for name in names)
    weight = jax.ShapeDtypeStruct((VOCAB, HIDDEN), "bfloat16")
    hlo = jax.jit(lambda w: (w.astype("float32") * 2, w.T)).lower(weight).compile().as_text()
    assert large_moves(hlo, {VOCAB * HIDDEN})
    hlo = jax.jit(lambda w: w.at[0, 0].set(1)).lower(weight).compile().as_text()  # not donated: copied
    assert large_moves(hlo, {VOCAB * HIDDEN})
