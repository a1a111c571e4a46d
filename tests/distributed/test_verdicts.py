"""Device. Verdicts, log-probabilities and edits over a split vocabulary: the numpy reference's, and one device's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec import shards
from jaxspec.distributed import make_mesh
from jaxspec.pallas_kernels.rejection.penalties import SEEN_IN_PROMPT
from jaxspec.rejection.verify import verify
from jaxspec.sampling.edit_table import edit_row
from jaxspec.sampling.edits import edit
from jaxspec.sampling.logits import draw, process
from jaxspec.sampling.logprobs import token_logprobs
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors import TokenContext
from jaxspec.types import Drafts
from tests.quick import heavy_but
from tests.rejection.batches import MIXED, B, V, expected, random_batch, table_of

N = 4  # devices
WHOLE, LOGITS = P(), P(None, None, "tensor")


def split_over(function, *, logits=(), out=WHOLE):
    """The function on N devices; arguments of these numbers are split along their last axis."""

    def run(*args):
        specs = tuple(
            jax.tree.map(lambda leaf: P(*[None] * (leaf.ndim - 1), "tensor"), arg) if at in logits else P()
            for at, arg in enumerate(args)
        )
        return jax.jit(jax.shard_map(function, mesh=make_mesh(N), in_specs=specs, out_specs=out))(*args)

    return run


def filled_up(x_XV):
    """A length that N divides."""
    padding = [(0, 0)] * (x_XV.ndim - 1) + [(0, -x_XV.shape[-1] % N)]
    return jnp.pad(x_XV, padding, constant_values=-jnp.inf if x_XV.dtype == jnp.float32 else 0)


CASES = [
    *((rule, with_logits, V - 3, "reference") for rule in ("coupled", "standard", "block")
      for with_logits in (False, True)),
    ("coupled", False, V, "reference"), ("coupled", False, V - 3, "pallas"), ("block", True, V - 3, "pallas"),
]  # fmt: skip
QUICK = [("block", True, V - 3, "reference")]


@pytest.mark.parametrize("case", heavy_but(CASES, lambda case: case in QUICK))
def test_verdicts_equal_the_plain_reference(case):
    """By the jnp form and by the kernels, over parts that are filled up; penalties, filters and drafts of any kind."""
    rule, with_logits, size, form = case
    judged = split_over(
        lambda logits, token_ids, counts, table, anchors, counts_BV, q=None: verify(
            logits, Drafts(token_ids, counts, q), table, anchors, counts_BV, rule=rule, implementation=form
        ),
        logits=(0, 5, 6),
    )
    params = [dict(one) for one in MIXED]
    params[1] |= {"presence": -0.7, "repetition": 1.3}
    params[3] |= {"frequency": 1.5}
    for seed in range(6 if form == "reference" else 3):
        logits, rows, draft_logits, drafts, anchors = random_batch(seed, with_logits, size)
        rng = np.random.default_rng(seed)
        prompts, outputs = rng.integers(0, size, (B, 9)), rng.integers(0, size, (B, 7))
        counts = np.stack([np.bincount(output, minlength=size) for output in outputs])
        counts += np.stack([np.bincount(prompt, minlength=size) > 0 for prompt in prompts]) * SEEN_IN_PROMPT
        verdict = judged(
            filled_up(jnp.asarray(logits)), drafts.token_ids_BK, drafts.counts_B, table_of(params),
            jnp.asarray(anchors, jnp.int32), filled_up(jnp.asarray(counts, jnp.int32)),
            *([filled_up(drafts.logits_BKV)] if with_logits else []),
        )  # fmt: skip
        texts = [{"prompt": tuple(prompts[b].tolist()), "output": tuple(outputs[b].tolist())} for b in range(B)]
        told = [one | text for one, text in zip(params, texts, strict=True)]
        tokens, accepted = expected(logits, rows, draft_logits, told, range(B), anchors, rule)
        assert verdict.token_ids_BJ.tolist() == tokens
        assert verdict.num_accepted_B.tolist() == accepted


def test_a_large_vocabulary_is_searched_by_its_candidates():
    """More blocks a device than are looked at first, rows that are flat and rows that are not."""
    rng = np.random.default_rng(0)
    size, rows = N * 5120, len(MIXED)
    logits = (rng.normal(size=(rows, 1, size)) * np.linspace(0.01, 4, rows)[:, None, None]).astype(np.float32)
    table, keys = table_of(MIXED), jnp.asarray(rng.integers(0, 2**31, (rows, 2)), jnp.uint32)

    def drawn(logits_BJV, keys):
        processed = process(logits_BJV, table)
        return processed, draw(processed[:, 0], keys, table)

    whole, token_B = jax.jit(drawn)(jnp.asarray(logits), keys)
    parts, own_B = split_over(drawn, logits=(0,), out=(LOGITS, WHOLE))(jnp.asarray(logits), keys)
    assert own_B.tolist() == token_B.tolist()
    is_kept = np.asarray(parts) > -np.inf
    # What lies within rounding of a cutoff may go either way.
    assert np.abs(is_kept.sum(axis=-1) - (np.asarray(whole) > -np.inf).sum(axis=-1)).max() <= 2
    assert is_kept.sum(axis=-1).min() < size


def test_edits_and_logprobs_are_those_of_one_device():
    rng = np.random.default_rng(1)
    size = V + 24 - 2  # two words of a mask, and an axis that 4 does not divide
    params = [
        SamplingParams(logit_bias={0: 3.0, size - 1: -2.0, 17: 50.0}),
        SamplingParams(allowed_token_ids=[1, 15, 16, 33, size - 1]),
        SamplingParams(bad_words=["x"], min_tokens=9),
        SamplingParams(),
    ]
    words = [[], [], [[3, 4], [40]], []]
    edits = jax.tree.map(
        lambda *rows: jnp.asarray(np.stack(rows)),
        *(edit_row(one, bad, size) for one, bad in zip(params, words, strict=True)),
    )
    logits = jnp.asarray(rng.normal(size=(4, 2, size)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, size, (4, 2)), jnp.int32)
    history = jnp.asarray(rng.integers(0, size, (4, 12)).astype(np.int32)).at[2, 7].set(3)

    def run(logits_BJV, edits, history, ids):
        context = TokenContext(history, jnp.full(4, 2, jnp.int32), jnp.full(4, 8, jnp.int32), jnp.full((4, 1), 3))
        stop_ids = jnp.array([[5, -1], [-1, -1], [38, 61], [-1, -1]], jnp.int32)
        edited = edit(logits_BJV, edits, context, stop_ids_BW=stop_ids, min_len_B=jnp.full(4, 11, jnp.int32))
        return edited, token_logprobs(logits_BJV, ids, num_top=20, is_normalised=True)

    edited, logprobs = jax.jit(run)(logits, edits, history, ids)
    own, own_logprobs = split_over(run, logits=(0,), out=(LOGITS, WHOLE))(filled_up(logits), edits, history, ids)
    np.testing.assert_array_equal(np.asarray(own)[..., :size], np.asarray(edited))
    assert (np.asarray(own)[..., size:] == -np.inf).all()
    assert np.isinf(np.asarray(edited)).any(axis=(1, 2)).tolist() == [True, True, True, False]
    for found, wanted in zip(jax.tree.leaves(own_logprobs), jax.tree.leaves(logprobs), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_a_program_that_would_return_its_own_part_as_everyones_is_refused():
    with pytest.raises(ValueError, match="statically"):
        split_over(lambda x: jnp.max(x), logits=(0,))(jnp.ones((1, 1, V)))
    found = split_over(lambda x: shards.largest(jnp.max(x)), logits=(0,))(jnp.arange(V, dtype=jnp.float32))
    assert float(found) == V - 1


def test_one_device_has_no_shards():
    x = jnp.arange(6.0)
    assert (shards.num_shards(), shards.is_split(x), shards.first_id(x), shards.whole_size(x)) == (1, False, 0, 6)
    for function in (shards.split, shards.summed, shards.largest, shards.smallest, shards.vocabulary_part):
        assert function(x) is x
