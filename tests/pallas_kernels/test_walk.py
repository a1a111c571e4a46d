"""Host. Which rows of logits are looked at: those up to each request's first draft that does not stand, once each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas_kernels.rejection.walk import walk


# Fewer requests than a turn has places, as many, and more.
@pytest.mark.parametrize("num_requests", [1, 3, 7])
def test_nothing_behind_a_rejected_draft_is_looked_at(num_requests):
    rng = np.random.default_rng(num_requests)
    most = 5
    counts_B = rng.integers(0, most + 1, num_requests)
    counts_B[0] = most
    start_B = np.cumsum(counts_B) - counts_B
    rows = rng.permutation(num_requests * (most + 1))
    bonus_rows_B, rows_N = rows[:num_requests], np.zeros(num_requests * most, np.int64)
    rows_N[: counts_B.sum()] = rows[num_requests : num_requests + counts_B.sum()]
    stands_N = rng.random(len(rows_N)) < 0.6
    looked = []

    def look(rows_X, n_X, is_on_X):
        looked.append(np.asarray(rows_X)[np.asarray(is_on_X)])
        return {"row": rows_X * 10, "n": n_X}

    with jax.disable_jit():  # so that `look` sees values, a turn at a time
        seen = walk(
            look,
            lambda found, n_X: jnp.asarray(stands_N)[found["n"]],
            {"row": jnp.full(len(rows), -1), "n": jnp.full(len(rows), -1)},
            50_000,
            *(jnp.asarray(one, jnp.int32) for one in (rows_N, bonus_rows_B, start_B, counts_B)),
        )

    needed = set()
    for b in range(num_requests):
        judged = range(start_B[b], start_B[b] + counts_B[b])
        kept = next((place for place, n in enumerate(judged) if not stands_N[n]), len(judged))
        needed |= {int(rows_N[n]) for n in judged[: kept + 1]}
        needed |= {int(bonus_rows_B[b])} if kept == len(judged) else set()
    visited = np.concatenate(looked).tolist()
    assert len(visited) == len(set(visited))
    assert needed <= set(visited)
    # Where places of one request share a turn, those behind a rejected draft may be among them.
    places = -(-(most + 1) // -(-(most + 1) // max(1, 4 // num_requests)))
    assert len(visited) - len(needed) <= num_requests * (places - 1)
    assert len(looked) <= (len(visited) + num_requests * most) // min(4, num_requests) + 1
    for row in range(len(rows)):
        assert int(seen["row"][row]) == (row * 10 if row in visited else -1)


def test_of_very_many_requests_all_rows_are_looked_at_once():
    rng = np.random.default_rng(1)
    num_requests, most = 300, 3
    counts_B = rng.integers(0, most + 1, num_requests)
    num_drafts = counts_B.sum()
    rows = rng.permutation(num_drafts + num_requests)
    rows_N = np.zeros(num_requests * most, np.int64)
    rows_N[:num_drafts] = rows[:num_drafts]
    seen = walk(
        lambda rows_X, n_X, is_on_X: {"row": rows_X * 10, "n": n_X},
        lambda found, n_X: jnp.zeros(n_X.shape, bool),
        {"row": jnp.full(len(rows), -1), "n": jnp.full(len(rows), -1)},
        50_000,
        *(jnp.asarray(one, jnp.int32) for one in (rows_N, rows[num_drafts:], np.cumsum(counts_B) - counts_B, counts_B)),
    )
    assert np.array_equal(seen["row"], np.arange(len(rows)) * 10)
    assert np.array_equal(np.asarray(seen["n"])[rows_N[:num_drafts]], np.arange(num_drafts))
