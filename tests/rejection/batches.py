"""Host. Batches of one shape for jaxspec's verify, and what the numpy reference makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.keys import request_key
from jaxspec.rejection.verify import verify
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.table import make_table
from jaxspec.types import Drafts
from tests.rejection import numpy_reference as plain

V, K, B = 40, 4, 8  # one shape for most tests: the program of each rule and kind of draft is compiled once
TEXTS = ("prompt", "output")


@functools.partial(jax.jit, static_argnames=("rule", "synthetic_rates"))
def verified(logits_BJV, drafts, table, anchor_B, rule, counts_BV=None, synthetic_rates=()):
    return verify(logits_BJV, drafts, table, anchor_B, counts_BV, rule=rule, synthetic_rates=synthetic_rates)


def drafts_of(rows, num_drafts=K, logits_BKV=None, padding=-1):
    ids = [[*row, *[padding] * (num_drafts - len(row))] for row in rows]
    return Drafts(
        token_ids_BK=jnp.asarray(ids, jnp.int32).reshape(len(rows), num_drafts),
        counts_B=jnp.asarray([len(row) for row in rows], jnp.int32),
        logits_BKV=logits_BKV,
    )


def table_of(params, seeds=None):
    """One row for each of the params, named as `numpy_reference.Row` names them; its texts say nothing here."""
    seeds = range(len(params)) if seeds is None else seeds
    longer = {name: f"{name}_penalty" for name in ("presence", "frequency", "repetition")}
    rows = [
        SamplingParams(**{longer.get(name, name): value for name, value in one.items() if name not in TEXTS})
        for one in params
    ]
    return make_table(rows, np.stack([request_key(seed) for seed in seeds]))


MIXED = [
    {"temperature": 0.0}, {}, {"temperature": 0.7}, {"temperature": 0.0, "top_k": 2}, {"top_k": 3}, {"top_p": 0.8},
    {"min_p": 0.1}, {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
]  # fmt: skip


def random_batch(seed, with_logits, vocab_size=V, num_drafts=K, params=MIXED):
    """A ragged batch: drafts that are often right, and often -1 or out of range."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(B, num_drafts + 1, vocab_size)).astype(np.float32) * 2
    draft_logits = logits[:, :num_drafts] + rng.normal(size=(B, num_drafts, vocab_size)).astype(np.float32)
    rows = []
    for row in range(B):
        likely = [np.argmax(logits[row, place] + rng.gumbel(size=vocab_size)) for place in range(num_drafts)]
        best = logits[row, :num_drafts].argmax(axis=-1)
        odd = rng.choice([-1, vocab_size, vocab_size + 7, 0], num_drafts)
        kind = rng.choice(3, num_drafts, p=[0.45, 0.45, 0.1])
        ids = np.where(kind == 0, best, np.where(kind == 1, likely, odd))
        rows.append([int(token) for token in ids[: rng.integers(0, num_drafts + 1)]])
    drafts = drafts_of(rows, num_drafts, jnp.asarray(draft_logits) if with_logits else None)
    return logits, rows, draft_logits if with_logits else None, drafts, rng.integers(1, 500, B)


def expected(logits, rows, draft_logits, params, seeds, anchors, rule, rates=None):
    out = []
    for b, one in enumerate(params):
        row = plain.Row(
            key=tuple(int(word) for word in request_key(seeds[b])), **one | {"temperature": one.get("temperature", 1.0)}
        )
        q = None if draft_logits is None else draft_logits[b]
        tokens, accepted = plain.judge(logits[b], rows[b], q, row, int(anchors[b]), rule, rates)
        out.append((tokens + [-1] * (logits.shape[1] - len(tokens)), accepted))
    return [tokens for tokens, _ in out], [accepted for _, accepted in out]
