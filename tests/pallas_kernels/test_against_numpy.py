"""Host. The kernels, interpreted, against rejection written a second time in float64 numpy, through `verify`."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

from jaxspec.rejection.verify import verify
from tests.rejection.batches import MIXED, expected, random_batch, table_of


@functools.partial(jax.jit, static_argnames="rule")
def verified(logits_BJV, drafts, table, anchor_B, rule):
    return verify(logits_BJV, drafts, table, anchor_B, rule=rule, implementation="pallas")


@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_random_ragged_batches(rule, seed):
    logits, rows, draft_logits, drafts, anchors = random_batch(seed, True, 8, 3)
    verdict = verified(jnp.asarray(logits), drafts, table_of(MIXED), jnp.asarray(anchors, jnp.int32), rule)
    tokens, accepted = expected(logits, rows, draft_logits, MIXED, range(len(MIXED)), anchors, rule)
    assert verdict.token_ids_BJ.tolist() == tokens
    assert verdict.num_accepted_B.tolist() == accepted
