"""Host. Random ragged batches of every kind against the float64 numpy reference, and the faults found in a peer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxspec.pallas_kernels.rejection.penalties import SEEN_IN_PROMPT
from tests.rejection.batches import B, K, V, drafts_of, expected, table_of, verified

RULES = ["standard", "block", "coupled", "synthetic"]
RATES = (0.9, 0.6, 0.6, 0.2)

draft_ids = st.integers(-2, V + 2)
one_request = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 3, V - 1, V + 5]),
        "top_p": st.sampled_from([1.0, 0.9, 0.4]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5]),
        "presence": st.sampled_from([0.0, 0.0, 0.7, -0.7]),
        "frequency": st.sampled_from([0.0, 0.0, 0.3, -0.2]),
        "repetition": st.sampled_from([1.0, 1.0, 1.4, 0.8]),
        "prompt": st.lists(st.integers(0, V - 1), max_size=6).map(tuple),
        "output": st.lists(st.integers(0, V - 1), max_size=6).map(tuple),
        "anchor": st.integers(1, 2**31 - 100),
        "drafts": st.lists(draft_ids, max_size=K),
        "best": st.lists(st.booleans(), min_size=K, max_size=K),  # where a draft is the target's arg-max instead
        "spread": st.sampled_from([0.5, 2.0, 8.0]),
    }
)


@pytest.mark.parametrize("with_logits", [False, True])
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(requests=st.lists(one_request, min_size=B, max_size=B), seed=st.integers(0, 2**31))
def test_any_batch_equals_the_plain_reference(rule, with_logits, requests, seed):
    rng = np.random.default_rng(seed)
    logits = np.stack([rng.normal(size=(K + 1, V)) * one["spread"] for one in requests]).astype(np.float32)
    draft_logits = (logits[:, :K] * 0.7 + rng.normal(size=(B, K, V))).astype(np.float32) if with_logits else None
    rows = [
        [int(logits[b, k].argmax()) if one["best"][k] else token for k, token in enumerate(one["drafts"])]
        for b, one in enumerate(requests)
    ]
    anchors = np.array([one["anchor"] for one in requests])
    params = [
        {name: value for name, value in one.items() if name not in ("anchor", "drafts", "best", "spread")}
        for one in requests
    ]
    counts = np.stack([np.bincount(np.array(one["output"], np.int64), minlength=V) for one in requests])
    counts += np.stack([np.isin(np.arange(V), one["prompt"]) for one in requests]) * SEEN_IN_PROMPT
    rates = RATES if rule == "synthetic" else None
    verdict = verified(
        jnp.asarray(logits),
        drafts_of(rows, K, None if draft_logits is None else jnp.asarray(draft_logits)),
        table_of(params),
        jnp.asarray(anchors, jnp.int32),
        rule,
        jnp.asarray(counts, jnp.int32),
        synthetic_rates=rates or (),
    )
    tokens, accepted = expected(logits, rows, draft_logits, params, range(B), anchors, rule, rates)
    assert verdict.token_ids_BJ.tolist() == tokens
    assert verdict.num_accepted_B.tolist() == accepted


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("with_logits", [False, True])
def test_greedy_rows_beside_random_ones(rule, with_logits):
    """B1 of behaviours.md: a margin of 20, drafts that are the arg-max, and a bonus for every row."""
    best = np.random.default_rng(0).integers(0, V, (B, K + 1))
    logits = 20.0 * np.eye(V, dtype=np.float32)[best]
    table = table_of([{"temperature": 0.0}, {"temperature": 1.0}] * (B // 2))
    drafts = drafts_of(best[:, :K].tolist(), K, jnp.asarray(logits[:, :K]) if with_logits else None)
    rates = (1.0,) * K if rule == "synthetic" else ()
    verdict = verified(jnp.asarray(logits), drafts, table, jnp.full(B, 9, jnp.int32), rule, synthetic_rates=rates)
    assert verdict.token_ids_BJ.tolist() == best.tolist()


@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
@pytest.mark.parametrize("num_right", [0, 1])
def test_filters_come_after_temperature(rule, num_right):
    """B2 of behaviours.md: top-p cuts the cooled distribution, for bonus and for recovered tokens."""
    num_rows = 20_000
    prob_V = np.full(V, 0.0)
    prob_V[:4] = [0.5, 0.3, 0.15, 0.05]
    with np.errstate(divide="ignore"):
        logits = np.broadcast_to(np.log(prob_V), (num_rows, 2, V)).astype(np.float32).copy()
    one = table_of([{"temperature": 2.0, "top_p": 0.75}])
    table = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_rows, *leaf.shape[1:])), one).replace(
        key_B2=jnp.asarray(np.random.default_rng(0).integers(2**32, size=(num_rows, 2), dtype=np.uint32))
    )
    # Without a draft the bonus; with one that the filters remove, what is recovered.
    drafts = drafts_of([[]] * num_rows if num_right == 0 else [[3]] * num_rows, 1)
    verdict = verified(jnp.asarray(logits), drafts, table, jnp.full(num_rows, 9, jnp.int32), rule)
    found = np.bincount(np.asarray(verdict.token_ids_BJ)[:, 0], minlength=V)[:4] / num_rows
    np.testing.assert_allclose(found, [0.431, 0.334, 0.236, 0.0], atol=0.015)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_last_request_keeps_its_bonus_when_the_first_is_rejected(rule, temperature):
    """B3 of behaviours.md: no padding among the drafts at all, and the first of them wrong."""
    best = np.random.default_rng(1).integers(0, V - 1, (B, K + 1))
    logits = 40.0 * np.eye(V, dtype=np.float32)[best]
    drafts = best[:, :K].copy()
    drafts[0, 0] = V - 1
    rates = (1.0,) * K if rule == "synthetic" else ()
    verdict = verified(
        jnp.asarray(logits),
        drafts_of(drafts.tolist()),
        table_of([{"temperature": temperature}] * B),
        jnp.full(B, 9, jnp.int32),
        rule,
        synthetic_rates=rates,
    )
    if rule == "synthetic":  # the draft itself stands, whatever the target says
        assert verdict.token_ids_BJ[0].tolist() == [V - 1, *best[0, 1:]]
    else:
        assert verdict.token_ids_BJ[0].tolist() == [best[0, 0], *[-1] * K]
    assert verdict.token_ids_BJ[1:].tolist() == best[1:].tolist()
