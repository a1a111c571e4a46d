"""Device. The int8 page pool against numpy: what a write rounds to, and what attention over it sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.pages import new_pool, pool_shape, write_entries
from jaxspec.models import attention
from jaxspec.models.base import Tokens
from jaxspec.pallas_kernels.paged_attention import paged_attention
from jaxspec.types import ArraySpec, Int8Pool
from tests.contracts.test_models import read_config
from tests.lossless.engines import SAME_HLO
from tests.models.paging import Pager, family_of
from tests.oracle.folders import TINY
from tests.oracle.goldens import assert_close
from tests.oracle.hlo import large_moves

P, HEADS, S, H = 6, 4, 3, 8


def rounded(entry_GH):
    """(integers, scale) of one token, head by head, in plain Python floats."""
    scale = [max(abs(float(x)) for x in head) / 127 or 1.0 for head in entry_GH]
    return [[round(float(x) / s) for x in head] for head, s in zip(entry_GH, scale, strict=True)], scale


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_writes_round_each_head_by_its_largest(num_tokens):
    rng = np.random.default_rng(num_tokens)
    entries = (
        rng.standard_normal((num_tokens, HEADS, H)) * 10.0 ** rng.integers(-6, 4, (num_tokens, HEADS, 1))
    ).astype(np.float32)
    entries[0, 1] = 0
    slots = np.array([4, 17, -1, 0, 9][:num_tokens], np.int32)
    old = Int8Pool(values_PGSH=jnp.full((P, HEADS, S, H), 99, jnp.int8), scale_PGS=jnp.full((P, HEADS, S), 7.0))
    found = jax.jit(write_entries)(old, entries, slots)
    values, scale = np.array(old.values_PGSH), np.array(old.scale_PGS)
    for entry, slot in zip(entries, slots, strict=True):
        if slot >= 0:
            values[slot // S, :, slot % S], scale[slot // S, :, slot % S] = rounded(entry)
    np.testing.assert_allclose(found.scale_PGS, scale, rtol=1e-6)
    # A quotient that lies on half an integer, give or take its own rounding, may go either way; and none does here.
    np.testing.assert_array_equal(found.values_PGSH, values)
    assert np.abs(np.asarray(found.values_PGSH)[1, :, 1]).max() == 127


def attend_in_numpy(q_QH, keys_GCH, values_GCU, position, scale, window, softcap):
    """One query token over its row's first `position` + 1 tokens."""
    first = 0 if window is None else max(0, position - window + 1)
    share = len(q_QH) // len(keys_GCH)
    out = []
    for head, q in enumerate(q_QH):
        scores = keys_GCH[head // share, first : position + 1] @ q * scale
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        weight = np.exp(scores - scores.max())
        out.append(weight / weight.sum() @ values_GCU[head // share, first : position + 1])
    return np.stack(out)


@pytest.mark.parametrize(
    ("window", "softcap", "value_size"),
    [(None, None, None), (4, 2.0, None), (None, None, 5)],
    ids=["full", "window", "latent"],
)
def test_attention_sees_integers_times_scales(window, softcap, value_size):
    """Two rows of unequal length over shuffled pages; what no row has written holds 127 and a scale of NaN."""
    rng = np.random.default_rng(3)
    heads = 1 if value_size else HEADS
    values = np.full((P, heads, S, H), 127, np.int8)
    scales = np.full((P, heads, S), np.nan, np.float32)
    pages, lengths = np.array([[4, 1, 5], [2, 0, -1]], np.int32), [8, 4]
    rows = []
    for row, length in enumerate(lengths):
        ints = rng.integers(-127, 128, (heads, length, H))
        scale = rng.uniform(0.001, 0.3, (heads, length)).astype(np.float32)
        for t in range(length):
            page, slot = pages[row, t // S], t % S
            values[page, :, slot], scales[page, :, slot] = ints[:, t], scale[:, t]
        rows.append(ints.astype(np.float64) * scale[:, :, None])
    q = rng.standard_normal((2, 2, 4, H)).astype(np.float32) * 0.05
    positions = np.array([[6, 7], [3, -1]], np.int32)
    found = paged_attention(
        *map(jnp.asarray, (q, values, pages, positions)),
        scale=0.7, window=window, softcap=softcap, value_size=value_size, scale_PGS=jnp.asarray(scales),
    )  # fmt: skip
    assert np.isfinite(found).all()
    for row, t in ((0, 0), (0, 1), (1, 0)):
        keys, seen = (rows[row], rows[row][..., :value_size]) if value_size else np.split(rows[row], 2)
        wanted = attend_in_numpy(q[row, t], keys, seen, positions[row, t], 0.7, window, softcap)
        np.testing.assert_allclose(found[row, t], wanted, rtol=2e-5, atol=2e-6)


KINDS = ["gemma3-text", "deepseek-v3-mtp"]  # full and sliding layers, latents


def pager_of(name):
    return Pager(TINY / name, num_rows=1, max_len=40, page_size=4)


def int8_pager(name):
    pager = pager_of(name)
    pager.pool = Int8Pool(
        values_PGSH=jnp.full(pager.pool.shape, 127, jnp.int8), scale_PGS=jnp.full(pager.pool.shape[:3], jnp.nan)
    )
    return pager


def write_rounded(pool, entries, slots):
    """What `rounded` says, into a pool of floats."""
    scale = jnp.abs(entries).max(axis=-1, keepdims=True) / 127
    return write_entries(pool, jnp.round(entries / jnp.where(scale > 0, scale, 1)) * scale, slots)


@pytest.mark.parametrize("name", KINDS)
def test_a_family_over_integers_is_one_over_rounded_floats(name, monkeypatch):
    """And drafts that were taken back leave no trace, as a prefill of the same text shows."""
    ids = np.random.default_rng(0).integers(0, read_config(name).vocab_size, 26).tolist()
    found = int8_pager(name).feed([ids], pad_to=26)[0][1]
    monkeypatch.setattr(attention, "write_entries", write_rounded)
    floats = pager_of(name)
    forward = floats.family.forward
    floats.family = floats.family._replace(forward=lambda *args: forward(*args))  # another program than others' tests'
    assert_close(floats.feed([ids], pad_to=26)[0][1], found, 1e-4)
    monkeypatch.undo()
    assert np.abs(pager_of(name).feed([ids], pad_to=26)[0][1] - found).max() > 1e-3, "rounding must act"

    pager = int8_pager(name)
    pager.feed([ids[:20]], pad_to=26)
    for wrong in ([3, 1, 4, 1, 5], [9]):
        pager.feed([wrong], pad_to=26)
        pager.rewind(0, len(wrong))
    # A value on the edge of two integers may fall to either side in another shape of pass.
    assert_close(pager.feed([ids[20:]], pad_to=26)[0][1], found[20:], 5e-3)


@pytest.mark.parametrize(("name", "num_tokens"), [("gemma3-text", 5), ("deepseek-v3-mtp", 1)])
def test_a_pass_copies_neither_integers_nor_scales(name, num_tokens):
    """Compiled as it runs. The sizes of values and scales are ones that nothing else has."""
    config = read_config(name)
    family = family_of(config.family)
    pool = jax.eval_shape(lambda: new_pool(pool_shape(config, 23, 4), "int8"))
    ids = jax.ShapeDtypeStruct((1, num_tokens), jnp.int32)
    pages = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    tokens = Tokens(token_ids_BT=ids, positions_BT=ids, slots_BT=ids, pages_BM=pages)
    weights = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        family.specs(config, np.float32),
        is_leaf=lambda leaf: isinstance(leaf, ArraySpec),
    )
    run = jax.jit(lambda weights, tokens, pool: family.forward(weights, config, tokens, pool), donate_argnums=2)
    program = run.lower(weights, tokens, pool).compile(compiler_options=SAME_HLO)
    sizes = {pool.values_PGSH.size: "the integers", pool.scale_PGS.size: "their scales"}
    assert large_moves(program.as_text(), sizes) == []
    assert program.memory_analysis().alias_size_in_bytes == pool.values_PGSH.size + 4 * pool.scale_PGS.size
