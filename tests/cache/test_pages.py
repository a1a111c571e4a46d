"""Device. Which slot a position has, and what becomes of a write that has none."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.pages import PADDING_SLOT_ID, new_pool, slots_of
from jaxspec.pallas_kernels.kv_write import kv_write


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_slots(page_size):
    rng = np.random.default_rng(page_size)
    pages_BM = np.stack([rng.permutation(40)[:5] for _ in range(3)]).astype(np.int32)
    pages_BM[1, 2:] = -1
    positions_BT = rng.integers(-2, 7 * page_size, (3, 50)).astype(np.int32)
    slots_BT = np.asarray(slots_of(jnp.asarray(positions_BT), jnp.asarray(pages_BM), page_size))
    for b in range(3):
        for position, slot in zip(positions_BT[b], slots_BT[b], strict=True):
            index = position // page_size
            has_page = position >= 0 and index < 5 and pages_BM[b, index] >= 0
            wanted = pages_BM[b, index] * page_size + position % page_size if has_page else PADDING_SLOT_ID
            assert slot == wanted


@pytest.mark.parametrize("num_tokens", [1, 2, 7])  # a lone write goes a way of its own
def test_writes(num_tokens):
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((5, 4, 3, 2)).astype(np.float32)
    entries = rng.standard_normal((num_tokens, 4, 2)).astype(np.float32)
    for slots in (np.arange(num_tokens) * 2, np.full(num_tokens, 14), np.full(num_tokens, -1)):
        if slots[0] == 14:
            slots[1:] = PADDING_SLOT_ID
        wanted = pool.copy()
        for slot, entry in zip(slots, entries, strict=True):
            if slot >= 0:
                wanted[slot // 3, :, slot % 3] = entry
        found = kv_write(jnp.asarray(pool), jnp.asarray(entries), jnp.asarray(slots, jnp.int32))
        np.testing.assert_array_equal(found, wanted)


def test_bits_of_bfloat16():
    entries = np.random.default_rng(0).standard_normal((3, 2, 4)).astype(np.float32)
    entries[1, 0, 0] = np.nan
    found = kv_write(new_pool((2, 2, 2, 4), "uint16"), jnp.asarray(entries), jnp.array([3, -1, 0], jnp.int32))
    wanted = np.zeros((2, 2, 2, 4), np.float32)
    wanted[1, :, 1], wanted[0, :, 0] = entries[0], entries[2]
    assert found.dtype == jnp.uint16
    np.testing.assert_array_equal(np.asarray(found).view(jnp.bfloat16), wanted.astype(jnp.bfloat16))
