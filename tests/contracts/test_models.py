"""Device. What every family owes: specs, names and a forward pass that fit together, rows that know nothing of each
other, drafts taken back without a trace, and a cache that is never copied."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.pages import pool_shape
from jaxspec.models.base import Tokens, random_weights
from jaxspec.models.registry import FAMILIES, family_of
from jaxspec.types import ArraySpec
from jaxspec.weights.checkpoint import open_checkpoint
from tests.contracts.members import FAMILY_MEMBERS, check_step
from tests.lossless.engines import SAME_HLO
from tests.models.paging import Pager
from tests.oracle.folders import TARGETS, TINY
from tests.oracle.goldens import assert_close
from tests.oracle.hlo import large_moves
from tests.quick import heavy_but

B, T, P, S = 2, 5, 6, 4
K = 6  # drafts taken back at most
PADDED = 26  # the shapes of tests/models/test_goldens.py, compiled once for both
# One member for each way a layer is built: what compiles, compiles alike in the others.
OFTEN = ("llama31", "gemma3-text", "deepseek-v3-mtp")
LAYERS = ["mistral-swa", "gemma3-text", "gpt2", "qwen3-moe", "deepseek-v3-mtp"]


@functools.cache
def read_config(name):
    with open_checkpoint(TINY / name) as checkpoint:
        return checkpoint.config


def test_every_family_has_a_folder_and_a_member_here():
    assert {read_config(name).family for name in TARGETS} == set(FAMILIES)
    assert {read_config(name).family for name in FAMILY_MEMBERS} == set(FAMILIES)


def spec_paths(tree, prefix=""):
    if isinstance(tree, ArraySpec):
        return {prefix.rstrip(".")}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return set().union(*(spec_paths(child, f"{prefix}{key}.") for key, child in items))


@pytest.mark.parametrize("source", ["hf", "gguf"])
@pytest.mark.parametrize("name", TARGETS)
def test_every_parameter_has_a_name_and_no_other_has(name, source):
    config = read_config(name)
    family = family_of(config.family)
    specs = family.specs(config, np.float32)
    assert set(family.name_table(config, source).sources) == spec_paths(specs)
    for spec in jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, ArraySpec)):
        assert len(spec.axes) == len(spec.shape)


# tests/models has them all in float32.
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, jnp.bfloat16) for name in FAMILY_MEMBERS), ("qwen2", jnp.float32)]
)
def test_forward_and_logits(name, dtype):
    config = read_config(name)
    family = family_of(config.family)
    weights = random_weights(family.specs(config, dtype), 0)
    pages_BM = np.array([[4, 2, -1], [0, 5, -1]], np.int32)
    positions_BT = np.array([[0, 1, 2, 3, 4], [0, 1, -1, -1, -1]], np.int32)
    slots_BT = np.array([[16, 17, 18, 19, 8], [0, 1, -1, -1, -1]], np.int32)
    tokens = Tokens(
        token_ids_BT=np.arange(B * T, dtype=np.int32).reshape(B, T),
        positions_BT=positions_BT,
        slots_BT=slots_BT,
        pages_BM=pages_BM,
    )

    def run(weights, pool, tokens):
        hidden, pool = family.forward(weights, config, tokens, pool)
        return pool, hidden, family.logits(weights, config, hidden)

    pool = jnp.full(pool_shape(config, P, S), jnp.nan, dtype)
    pool, hidden, logits = check_step(run, 1, weights, pool, tokens)
    assert (hidden.shape, hidden.dtype) == ((B, T, config.hidden_size), jnp.float32)
    assert (logits.shape, logits.dtype) == ((B, T, config.vocab_size), jnp.float32)
    assert np.isfinite(hidden).all()
    assert np.isfinite(logits).all()
    # Written: the slots given, in every layer; nothing else.
    by_layer = np.asarray(pool.astype(jnp.float32)).reshape(config.num_layers, P, -1, S, pool.shape[-1])
    is_written = np.isfinite(by_layer).all(axis=(2, 4))
    wanted = np.zeros((P, S), bool)
    wanted.reshape(-1)[slots_BT[slots_BT >= 0]] = True
    np.testing.assert_array_equal(is_written, np.broadcast_to(wanted, is_written.shape))
    np.testing.assert_array_equal(np.isnan(by_layer).all(axis=(2, 4)), ~is_written)


def make_pager(name):
    return Pager(TINY / name, num_rows=2, max_len=40, page_size=4)


@pytest.mark.parametrize("name", heavy_but(FAMILY_MEMBERS, OFTEN.__contains__))
def test_what_was_taken_back_leaves_no_trace(name):
    """T11: a draft of K wrong tokens, rejected at each of 0..K; what comes next is what a fresh prefill says. Row 1 is
    as far along, so that every window is full and pages are crossed."""
    rng = np.random.default_rng(0)
    vocab_size = read_config(name).vocab_size
    prompts = rng.integers(0, vocab_size, (2, 21)).tolist()
    pager = make_pager(name)
    pager.feed([prompts[0], prompts[1][:13]], pad_to=PADDED)
    committed = [list(prompts[0]), prompts[1][:13]]
    for kept in range(K + 1):
        drafts = rng.integers(0, vocab_size, (2, K)).tolist()
        pager.feed(drafts, pad_to=PADDED)
        for row in range(2):
            keep = (kept, K - kept)[row] if len(committed[row]) + K < 36 else 0
            pager.rewind(row, K - keep)
            committed[row] += drafts[row][:keep]
        next_ids = rng.integers(0, vocab_size, (2, 1)).tolist()
        found = pager.feed(next_ids, pad_to=PADDED)
        pager.rewind(0, 1)
        pager.rewind(1, 1)
        fresh = make_pager(name)
        texts = [committed[row] + next_ids[row] for row in range(2)]
        for cut in (slice(0, PADDED), slice(PADDED, None)):
            prefilled = fresh.feed([text[cut] for text in texts], pad_to=PADDED)
            for row in range(2):
                if texts[row][cut] and len(texts[row]) <= (cut.stop or 99):
                    assert_close(found[row][1][-1], prefilled[row][1][-1], 1e-5)


@pytest.mark.parametrize("name", heavy_but(FAMILY_MEMBERS, OFTEN.__contains__))
def test_a_row_does_not_depend_on_its_neighbours(name):
    """Whatever stands beside it, padding too, in either row of the batch: experts see all rows at once."""
    ids = np.random.default_rng(1).integers(0, read_config(name).vocab_size, (3, 20)).tolist()
    ((_, alone), _) = make_pager(name).feed([ids[0], []], pad_to=PADDED)
    for other in (ids[1], ids[2][:3], ids[0]):
        for row in (0, 1):
            rows = [ids[0], other] if row == 0 else [other, ids[0]]
            beside = make_pager(name).feed(rows, pad_to=PADDED)[row][1]
            assert_close(beside, alone, 1e-6)
            assert (beside.argmax(axis=1) == alone.argmax(axis=1)).all()


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 1), (2, 5)])
@pytest.mark.parametrize("name", heavy_but(LAYERS, OFTEN.__contains__))
def test_a_pass_copies_no_cache(name, num_rows, num_tokens):
    """Compiled as it runs; a lone token goes ways of its own. The pool's size is one that nothing else has."""
    config = read_config(name)
    family = family_of(config.family)
    shape = pool_shape(config, 23, S)
    ids = jax.ShapeDtypeStruct((num_rows, num_tokens), jnp.int32)
    pages = jax.ShapeDtypeStruct((num_rows, 3), jnp.int32)
    tokens = Tokens(token_ids_BT=ids, positions_BT=ids, slots_BT=ids, pages_BM=pages)
    weights = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        family.specs(config, np.float32),
        is_leaf=lambda leaf: isinstance(leaf, ArraySpec),
    )
    run = jax.jit(lambda weights, tokens, pool: family.forward(weights, config, tokens, pool), donate_argnums=2)
    program = run.lower(weights, tokens, jax.ShapeDtypeStruct(shape, jnp.float32)).compile(SAME_HLO)
    size = int(np.prod(shape))
    assert size % 23 == 0
    assert large_moves(program.as_text(), {size: "the page pool"}) == []
    assert program.memory_analysis().alias_size_in_bytes == 4 * size
