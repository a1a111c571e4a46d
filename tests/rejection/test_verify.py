"""Host. Verdicts against a float64 numpy reference: every rule, mixed rows, ragged, missing and broken drafts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas_kernels.rejection.penalties import SEEN_IN_PROMPT
from tests.quick import heavy_but
from tests.rejection.batches import MIXED, B, K, V, drafts_of, expected, random_batch, table_of, verified

NAN = float("nan")
RULES = ["standard", "block", "coupled"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("with_logits", [False, True])
@pytest.mark.parametrize(
    ("vocab_size", "num_drafts"),
    [(V, K), *(pytest.param(*sizes, marks=pytest.mark.heavy) for sizes in ((8, 3), (V, 0)))],
)
def test_verdicts_equal_the_plain_reference(rule, with_logits, vocab_size, num_drafts):
    for seed in range(6):
        logits, rows, draft_logits, drafts, anchors = random_batch(seed, with_logits, vocab_size, num_drafts)
        verdict = verified(jnp.asarray(logits), drafts, table_of(MIXED), jnp.asarray(anchors, jnp.int32), rule)
        tokens, accepted = expected(logits, rows, draft_logits, MIXED, range(len(MIXED)), anchors, rule)
        assert verdict.token_ids_BJ.tolist() == tokens
        assert verdict.num_accepted_B.tolist() == accepted


PENALISED = [
    {"temperature": 0.0, "frequency": 1.5}, {"presence": -0.7}, {"temperature": 0.7, "repetition": 1.3}, {},
    {"temperature": 0.0, "repetition": 0.8, "presence": 2.0}, {"top_k": 3, "frequency": -0.4}, {"min_p": 0.1},
    {"top_p": 0.8, "temperature": 1.5, "presence": 0.4, "frequency": 0.3, "repetition": 1.2},
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("with_logits", [False, True])
def test_penalties_count_prompt_output_and_the_drafts_before(rule, with_logits):
    for seed in range(6):
        logits, rows, draft_logits, drafts, anchors = random_batch(seed, with_logits)
        rng = np.random.default_rng(100 + seed)
        prompts, outputs = rng.integers(0, V, (B, 20)), rng.integers(0, V, (B, 15))
        counts = np.stack([np.bincount(output, minlength=V) for output in outputs])
        counts += np.stack([np.bincount(prompt, minlength=V) > 0 for prompt in prompts]) * SEEN_IN_PROMPT
        params = [
            one | {"prompt": tuple(prompt.tolist()), "output": tuple(output.tolist())}
            for one, prompt, output in zip(PENALISED, prompts, outputs, strict=True)
        ]
        verdict = verified(
            jnp.asarray(logits),
            drafts,
            table_of(PENALISED),
            jnp.asarray(anchors, jnp.int32),
            rule,
            jnp.asarray(counts, jnp.int32),
        )
        tokens, accepted = expected(logits, rows, draft_logits, params, range(B), anchors, rule)
        assert verdict.token_ids_BJ.tolist() == tokens
        assert verdict.num_accepted_B.tolist() == accepted


def test_counts_without_a_penalty_change_nothing():
    logits, _, _, drafts, anchors = random_batch(4, True)
    inputs = (jnp.asarray(logits), drafts, table_of(MIXED), jnp.asarray(anchors, jnp.int32), "block")
    counted = verified(*inputs, jnp.full((B, V), SEEN_IN_PROMPT + 3, jnp.int32))
    np.testing.assert_array_equal(counted.token_ids_BJ, verified(*inputs).token_ids_BJ)


RATES = [(0.8, 0.5, 0.5, 0.1), (1.0, 1.0, 0.4, 0.0), (0.0,) * 4, (1.0,) * 4]


@pytest.mark.parametrize("with_logits", [False, True])
@pytest.mark.parametrize("rates", heavy_but(RATES, lambda rates: rates == RATES[0]))
def test_synthetic_verdicts_equal_the_plain_reference(with_logits, rates):
    for seed in range(3):
        logits, rows, draft_logits, drafts, anchors = random_batch(seed, with_logits)
        inputs = (jnp.asarray(logits), drafts, table_of(MIXED), jnp.asarray(anchors, jnp.int32))
        verdict = verified(*inputs, "synthetic", synthetic_rates=rates)
        tokens, accepted = expected(logits, rows, draft_logits, MIXED, range(B), anchors, "synthetic", rates)
        assert verdict.token_ids_BJ.tolist() == tokens
        assert verdict.num_accepted_B.tolist() == accepted


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("with_logits", [False, True])
def test_what_lies_past_the_drafts_is_never_looked_at(rule, with_logits):
    """NaN in all logits past a row's bonus, right and wild ids past its count."""
    logits, rows, _, drafts, anchors = random_batch(3, with_logits)
    anchor_B = jnp.asarray(anchors, jnp.int32)
    clean = verified(jnp.asarray(logits), drafts, table_of(MIXED), anchor_B, rule)
    past_BJ = np.arange(K + 1)[None] > np.asarray(drafts.counts_B)[:, None]
    poisoned = jnp.asarray(np.where(past_BJ[:, :, None], NAN, logits))
    draft_logits = None
    if with_logits:
        draft_logits = jnp.where(past_BJ[:, 1:, None], NAN, drafts.logits_BKV)
    for padding in (0, V - 1, 2**31 - 1, -7):
        garbage = drafts_of(rows, K, draft_logits, padding)
        dirty = verified(poisoned, garbage, table_of(MIXED), anchor_B, rule)
        np.testing.assert_array_equal(clean.token_ids_BJ, dirty.token_ids_BJ)
        np.testing.assert_array_equal(clean.num_accepted_B, dirty.num_accepted_B)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("with_logits", [False, True])
def test_rows_do_not_influence_one_another(rule, with_logits):
    """T7: a row together with others, among copies of itself, and permuted; never only in row 0."""
    logits, rows, draft_logits, drafts, anchors = random_batch(5, with_logits)
    table, anchor_B = table_of(MIXED), jnp.asarray(anchors, jnp.int32)
    together = verified(jnp.asarray(logits), drafts, table, anchor_B, rule).token_ids_BJ

    def some(index):
        q = None if draft_logits is None else jnp.asarray(draft_logits[index])
        chosen = drafts_of([rows[b] for b in index], K, q)
        return verified(
            jnp.asarray(logits[index]), chosen, jax.tree.map(lambda leaf: leaf[index], table), anchor_B[index], rule
        ).token_ids_BJ

    for b in range(B):
        np.testing.assert_array_equal(some(np.full(B, b)), together[np.full(B, b)])
    order = np.asarray([5, 2, 7, 0, 3, 6, 1, 4])
    np.testing.assert_array_equal(some(order), together[order])


def test_a_greedy_row_beside_a_random_one():
    """B1 of behaviours.md: a margin of 20, drafts that are the arg-max, and a bonus for every row."""
    best = np.random.default_rng(0).integers(0, V, (B, K + 1))
    logits = 20.0 * jax.nn.one_hot(best, V, dtype=jnp.float32)
    table = table_of([{"temperature": 0.0}, {"temperature": 1.0}] * (B // 2))
    verdict = verified(logits, drafts_of(best[:, :K].tolist()), table, jnp.full(B, 9, jnp.int32), "standard")
    assert verdict.token_ids_BJ.tolist() == best.tolist()


def test_seeds_do_not_matter_to_greedy_rows():
    """T8: greedy rows draw no random numbers."""
    params = [{"temperature": 0.0}] * B
    logits, _, _, drafts, anchors = random_batch(8, False, params=params)
    outs = [
        verified(
            jnp.asarray(logits),
            drafts,
            table_of(params, [seed] * B),
            jnp.asarray(anchors + seed, jnp.int32),
            "standard",
        )
        for seed in (1, 9)
    ]
    np.testing.assert_array_equal(outs[0].token_ids_BJ, outs[1].token_ids_BJ)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("with_logits", [False, True])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5, "top_k": 2, "min_p": 0.1}])
def test_broken_logits_still_give_ids_in_the_vocabulary(rule, with_logits, params):
    """T13: rows of NaN, of -inf, and of NaN but for one entry; drafts anywhere."""
    logits = np.full((B, K + 1, V), NAN, np.float32)
    logits[1] = -np.inf
    logits[2, :, 6] = 1.0
    logits[3] = np.inf
    q = jnp.asarray(np.full((B, K, V), NAN), jnp.float32) if with_logits else None
    drafts = drafts_of([[3, V], [0, -1, 5], [6, 6], [2, 2, 2, 2], [0, 0], [], [-1], [V - 1] * 4], K, q)
    verdict = verified(jnp.asarray(logits), drafts, table_of([params] * B), jnp.full(B, 7, jnp.int32), rule)
    emitted, counts = np.asarray(verdict.token_ids_BJ), np.asarray(verdict.num_accepted_B)
    for row in range(B):
        kept = emitted[row, : counts[row] + 1]
        assert ((kept >= 0) & (kept < V)).all()
        assert (emitted[row, counts[row] + 1 :] == -1).all()
    assert (emitted[2, : counts[2] + 1] == 6).all()


def test_an_empty_residual_gives_a_token_of_the_target():
    """p = q to the last bit, yet q's draft is out of reach: nothing is left of max(p - q, 0)."""
    logits = np.full((64, 2, 10), -np.inf, np.float32)
    logits[:, :, [4, 7]] = 0.0
    drafts = drafts_of([[2]] * 64, 1, jnp.asarray(logits[:, :1]))
    verdict = verified(jnp.asarray(logits), drafts, table_of([{}] * 64), jnp.full(64, 7, jnp.int32), "standard")
    assert verdict.num_accepted_B.tolist() == [0] * 64
    assert set(verdict.token_ids_BJ[:, 0].tolist()) == {4, 7}


@pytest.mark.parametrize("rule", heavy_but(["standard", "block"], lambda rule: rule == "standard"))
@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"top_k": 1}], ids=str)
def test_a_filter_that_leaves_the_draft_alone_accepts_it(rule, filters):
    """The draft's probability is 1, however its logit is divided by the temperature (a compiler has two ways)."""
    logits = np.random.default_rng(3).normal(size=(B, K + 1, 300)).astype(np.float32)
    best = logits.argmax(axis=-1)
    np.put_along_axis(logits, best[..., None], 30 + np.random.default_rng(4).random((B, K + 1, 1)), axis=-1)
    table = table_of([{"temperature": 0.9, **filters}] * B)
    verdict = verified(jnp.asarray(logits), drafts_of(best[:, :K].tolist()), table, jnp.full(B, 9, jnp.int32), rule)
    assert verdict.token_ids_BJ.tolist() == best.tolist()


def test_equal_distributions_accept_every_draft():
    """p / q = 1 is at least any u, for any rounding of log p and log q, with u as near to 1 as it comes."""
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(20_000, 2, 5)) * 8).astype(np.float32)
    ids = [[int(token)] for token in rng.integers(0, 5, 20_000)]
    drafts = drafts_of(ids, 1, jnp.asarray(logits[:, :1]))
    table = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[0], (20_000, *leaf.shape[1:])), table_of([{}]))
    verdict = verified(jnp.asarray(logits), drafts, table, jnp.arange(20_000, dtype=jnp.int32), "standard")
    assert verdict.num_accepted_B.min() == 1


def markov_chain(rule, num_drafts, guess, length=24, params=MIXED):
    """Rows decoded to `length` tokens over a Markov table, with guess(row, tokens) -> drafts."""
    logits_VV = np.random.default_rng(11).normal(size=(V, V)).astype(np.float32) * 2
    table = table_of(params)
    chains = [[b] for b in range(len(params))]
    while min(map(len, chains)) < length:
        rows = [list(guess(b, chain))[:num_drafts] for b, chain in enumerate(chains)]
        inputs = [[chain[-1], *row, *[0] * (num_drafts - len(row))] for chain, row in zip(chains, rows, strict=True)]
        logits = jnp.asarray(logits_VV[np.asarray(inputs)])
        anchor_B = jnp.asarray([len(chain) for chain in chains], jnp.int32)
        verdict = verified(logits, drafts_of(rows, num_drafts), table, anchor_B, rule)
        for chain, tokens in zip(chains, verdict.token_ids_BJ.tolist(), strict=True):
            chain.extend(token for token in tokens if token >= 0)
    return [chain[:length] for chain in chains]


@pytest.mark.parametrize("num_drafts", heavy_but([1, K], lambda num_drafts: num_drafts == K))
def test_coupled_text_is_that_of_plain_decoding(num_drafts):
    """The same ids for every drafter and K: one that is always right, often right, always wrong, or silent."""
    plainly = markov_chain("coupled", 0, lambda b, chain: [])
    rng = np.random.default_rng(0)

    def right(b, chain):
        return plainly[b][len(chain) : len(chain) + num_drafts]

    def wrong(b, chain):
        return [(token + 1) % V for token in right(b, chain)]

    def mixed(b, chain):
        return [token if rng.random() < 0.7 else 3 for token in right(b, chain)]

    def ragged(b, chain):
        return mixed(b, chain)[: rng.integers(0, num_drafts + 1)]

    for guess in (right, wrong, mixed, ragged, lambda b, chain: []):
        assert markov_chain("coupled", num_drafts, guess) == plainly


def test_a_right_drafter_is_accepted_whole():
    """T3 without a model: the coupled continuation, proposed, is always kept in full."""
    plainly = markov_chain("coupled", 0, lambda b, chain: [])
    rounds = []

    def right(b, chain):
        rounds.append(b)
        return plainly[b][len(chain) : len(chain) + K]

    markov_chain("coupled", K, right, length=21)
    assert rounds.count(0) == 4  # 1 token to start with, 5 a round


def test_a_second_call_does_not_compile():
    logits, _, _, drafts, anchors = random_batch(1, False)
    verified(jnp.asarray(logits), drafts, table_of(MIXED), jnp.asarray(anchors, jnp.int32), "standard")
    before = verified._cache_size()
    logits, _, _, drafts, anchors = random_batch(2, False)
    verified(jnp.asarray(logits), drafts, table_of(MIXED[::-1]), jnp.asarray(anchors, jnp.int32), "standard")
    assert verified._cache_size() == before
