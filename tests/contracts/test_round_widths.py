"""Device. A round of any width commits the same text, and makes no more drafts than it holds."""

import functools

import jax
import numpy as np
import pytest

from jaxspec.step import pack, rounds
from tests.contracts.members import MAX_LEN, PAGE_SIZE, ROWS, K, make_proposer, make_target, make_weights, pages_of
from tests.contracts.test_catch_up import PROMPTS, prefilled

WIDTHS = (0, 1, K)
DEAR = 1e6
TOKENS = 12


def batch_of(seconds, max_drafts=pack.NO_LIMIT):
    """The rows, each draft of which is sure to be kept, and what rounds of each width cost."""
    rows = list(PROMPTS)
    return pack.pack_batch(
        rows,
        [pages_of(row) for row in rows],
        2,
        ROWS,
        MAX_LEN // PAGE_SIZE,
        max_drafts,
        np.ones((2, K), np.float32),
        np.array(seconds, np.float32),
    )


def texts_of(run, proposer, batch):
    """(each row's next tokens, the most drafts of each round), by rounds over this batch."""
    weights = make_weights()
    state = prefilled(proposer, weights, PROMPTS)
    texts, counts = [[], []], []
    while min(map(len, texts)) < TOKENS:
        state, output = run(weights, state, batch)
        packed_BX = np.asarray(output.packed_BX)
        assert packed_BX.shape == (2, K + 3)
        for row, text in zip(packed_BX.tolist(), texts, strict=True):
            assert all(token >= 0 for token in row[: row[-1] + 1])
            assert all(token == -1 for token in row[row[-1] + 1 : K + 1])
            text += row[: row[-1] + 1]
        counts.append(int(packed_BX[:, -2].max()))
    return [text[:TOKENS] for text in texts], counts


@pytest.mark.parametrize("name", ["ngram", pytest.param("eagle3", marks=pytest.mark.heavy)])
def test_every_width_says_the_same(name):
    proposer = make_proposer(name)
    run = jax.jit(functools.partial(rounds.decode_round, make_target(), proposer, widths=WIDTHS))
    plain, no_drafts = texts_of(run, proposer, batch_of([1, 1, 1], 0))
    narrow, few = texts_of(run, proposer, batch_of([DEAR, 1, DEAR]))
    wide, all_ = texts_of(run, proposer, batch_of([DEAR, DEAR, 1]))
    off, none = texts_of(run, proposer, batch_of([1, DEAR, DEAR]))
    assert plain == narrow == wide == off
    assert [max(no_drafts), max(few), max(all_), max(none)] == [0, 1, K, 0]
