"""Device. A round of any width commits the same text, and makes no more drafts than it holds."""

import functools

import jax
import numpy as np
import pytest

from jaxspec.step import pack, rounds
from tests.contracts.members import PAGE_SIZE, ROWS, K, make_proposer, make_state, make_target, make_weights, pages_of
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
        make_state(make_proposer("none")).history_RC.shape[1] // PAGE_SIZE,
        max_drafts,
        np.ones((2, K), np.float32) if seconds else None,
        np.array(seconds, np.float32) if seconds else None,
    )


@functools.cache
def program(name, weighs):
    del weighs  # the batch then has other leaves
    run = functools.partial(rounds.decode_round, make_target(), make_proposer(name), widths=WIDTHS)
    return jax.jit(run)


def texts_of(name, batch):
    """(each row's next tokens, the most drafts of each round), by rounds over this batch."""
    weights = make_weights()
    state = prefilled(make_proposer(name), weights, PROMPTS)
    texts, counts = [[], []], []
    while min(map(len, texts)) < TOKENS:
        state, output = program(name, batch.seconds_W is not None)(weights, state, batch)
        packed_BX = np.asarray(output.packed_BX)
        assert packed_BX.shape == (2, K + 3)
        for row, text in zip(packed_BX.tolist(), texts, strict=True):
            assert all(token >= 0 for token in row[: row[-1] + 1])
            assert all(token == -1 for token in row[row[-1] + 1 : K + 1])
            text += row[: row[-1] + 1]
        counts.append(int(packed_BX[:, -2].max()))
    return [text[:TOKENS] for text in texts], counts


@pytest.mark.parametrize("name", ["ngram", "eagle3"])
def test_every_width_says_the_same(name):
    plain, no_drafts = texts_of(name, batch_of(None, 0))
    assert set(no_drafts) == {0}
    narrow, few = texts_of(name, batch_of([DEAR, 1, DEAR]))
    wide, all_ = texts_of(name, batch_of([DEAR, DEAR, 1]))
    unweighed, as_many = texts_of(name, batch_of(None))
    weighed_off, none = texts_of(name, batch_of([1, DEAR, DEAR]))
    assert plain == narrow == wide == unweighed == weighed_off
    assert (max(few), max(all_), max(as_many), max(none)) == (1, K, K, 0)
    assert all_ == as_many
