"""Host. Random arguments for `api.reject`: ragged segments, rows in any order, and NaN wherever nobody should look."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.pallas_kernels.rejection.penalties import SEEN_IN_PROMPT, Penalties
from jaxspec.pallas_kernels.rejection.rules import GREEDY


def random_arguments(spec, rules, rng: np.random.Generator, *, is_full: bool = False, broken: float = 0) -> dict:
    """Arguments of the shapes of a spec.

    Args:
        rules: the codes to choose from, one a request.
        is_full: every request has all K drafts.
        broken: the share of rows that hold NaN, -inf or +inf besides numbers.
    """
    B, K, V = spec.num_requests, spec.num_drafts, spec.vocab_size
    R, N = B * (K + 1), B * K
    counts = np.full(B, K) if is_full else rng.integers(0, K + 1, B)
    total = int(counts.sum())
    ends = np.cumsum(counts)
    request_N = np.repeat(np.arange(B), counts)
    place_N = np.arange(total) - np.repeat(ends - counts, counts)
    rows = rng.permutation(R)[: total + B]
    bonuses, targets = rows[:B], rows[B:]
    draft_rows = rng.permutation(N)[:total]

    logits = np.full((R, V), np.nan, np.float32)
    logits[rows] = rng.normal(size=(len(rows), V)) * 2
    draft_logits = np.full((N, V), np.nan, np.float32)
    draft_logits[draft_rows] = logits[targets] + rng.normal(size=(total, V))
    ids = np.where(rng.random(total) < 0.6, logits[targets].argmax(axis=1), rng.integers(0, V, total))
    ids = np.where(rng.random(total) < 0.1, rng.choice([-1, V, 2**31 - 1], total), ids)
    for row in rows[rng.random(len(rows)) < broken]:
        odd = rng.choice(np.array([np.nan, -np.inf, np.inf], np.float32))
        logits[row, rng.random(V) < rng.choice([0.3, 1.0])] = odd

    rule_B = rng.choice(rules, B)
    request_R, offset_R = np.zeros(R, np.int64), np.full(R, K)
    request_R[targets], request_R[bonuses] = request_N, np.arange(B)
    offset_R[targets], offset_R[bonuses] = place_N, counts
    is_read_R = np.isin(np.arange(R), rows)
    is_sampled_R = is_read_R & (rule_B[request_R] != GREEDY)
    is_filtered_R = is_sampled_R & (rng.random(R) < 0.5)

    def if_(condition, values, otherwise, unread=np.nan):
        return np.where(is_read_R, np.where(condition, values, otherwise), unread)

    pad = N - total
    arguments: dict[str, Any] = {
        "logits_RV": jnp.asarray(logits),
        "draft_logits_NV": jnp.asarray(draft_logits, spec.draft_dtype) if spec.has_draft_logits else None,
        "draft_token_ids_N": jnp.asarray([*ids, *[-1] * pad], jnp.int32),
        "target_rows_N": jnp.asarray([*targets, *[-1] * pad], jnp.int32),
        "draft_rows_N": jnp.asarray([*draft_rows, *[0] * pad], jnp.int32),
        "bonus_rows_B": jnp.asarray(bonuses, jnp.int32),
        "cu_num_draft_tokens_B": jnp.asarray(ends, jnp.int32),
        "rule_R": jnp.asarray(if_(True, rule_B[request_R], GREEDY, GREEDY), jnp.int32),
        "temperature_R": jnp.asarray(if_(is_sampled_R, rng.choice([0.5, 1.0, 1.7], R), 1.0), jnp.float32),
        "top_k_R": jnp.asarray(if_(is_filtered_R, rng.choice([0, 1, 5, 2 * V], R), 0, 3), jnp.int32),
        "top_p_R": jnp.asarray(if_(is_filtered_R, rng.choice([1.0, 0.8, 0.1], R), 1.0), jnp.float32),
        "min_p_R": jnp.asarray(if_(is_filtered_R, rng.choice([0.0, 0.1], R), 0.0), jnp.float32),
        "accept_uniform_R": jnp.asarray((rng.integers(0, 2**23, R) + 0.5) / 2**23, jnp.float32),
        "noise_key_R2": jnp.asarray(rng.integers(2**32, size=(R, 2), dtype=np.uint32)),
    }
    if spec.has_rates:
        arguments["accept_rate_N"] = jnp.asarray(rng.choice([0.0, 0.3, 0.8, 1.0], N), jnp.float32)
    if spec.has_penalties:
        seen_BV = np.where(rng.random((B, V)) < 0.3, rng.integers(0, 4, (B, V)), 0)
        seen_BV += np.where(rng.random((B, V)) < 0.3, SEEN_IN_PROMPT, 0)
        arguments["penalties"] = Penalties(
            counts_BV=jnp.asarray(seen_BV, jnp.int32),
            request_R=jnp.asarray(request_R, jnp.int32),
            offset_R=jnp.asarray(offset_R, jnp.int32),
            presence_B=jnp.asarray(rng.choice([0.0, 0.7], B), jnp.float32),
            frequency_B=jnp.asarray(rng.choice([0.0, -0.4, 0.4], B), jnp.float32),
            repetition_B=jnp.asarray(rng.choice([1.0, 0.5, 1.8], B), jnp.float32),
        )
    return arguments


def assert_equal(found: tuple[jax.Array, jax.Array], expected: tuple[jax.Array, jax.Array]) -> None:
    """Same drafts kept, same tokens after them: integers, so no tolerance."""
    np.testing.assert_array_equal(found[0], expected[0], err_msg="num_accepted_B")
    np.testing.assert_array_equal(found[1], expected[1], err_msg="token_ids_B")
