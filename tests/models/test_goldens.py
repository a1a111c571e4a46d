"""Device. Every target golden against recorded outputs of transformers, over shuffled pages of a pool full of NaN."""

import numpy as np
import pytest

from tests.models.paging import Pager
from tests.oracle.folders import TARGETS, TINY
from tests.oracle.goldens import assert_close, read_golden

ONE_PASS = [[24, 24]]
CHUNKS = [[1, 9], [7, 0], [8, 6], [0, 1], [8, 8]]  # tokens of each row, call after call
PADDED = 26  # one shape for all cuts: one compilation a model


def in_cuts(pager, ids_BT, cuts):
    """(hidden, logits) of each row, its parts joined again."""
    found = [[], []]
    for cut in cuts:
        rows = [ids_BT[b, pager.len_B[b] : pager.len_B[b] + cut[b]].tolist() for b in range(2)]
        for b, pair in enumerate(pager.feed(rows, pad_to=PADDED)):
            found[b].append(pair)
    return [[np.concatenate(parts) for parts in zip(*pairs, strict=True)] for pairs in found]


@pytest.mark.parametrize("name", TARGETS)
def test_in_any_cut_and_token_by_token(name):
    """One pass, chunks of two rows at odds with each other, then the greedy continuation one token a pass."""
    expected = read_golden(name)
    for cuts in (ONE_PASS, CHUNKS):
        pager = Pager(TINY / name, num_rows=2, max_len=40, page_size=4)
        for b, (hidden, logits) in enumerate(in_cuts(pager, expected["input_ids"], cuts)):
            assert_close(hidden, expected["final_hidden"][b])
            assert_close(logits, expected["logits"][b])
    token_ids = [int(logits_of_row_0(pager, expected)[-1].argmax())]
    while len(token_ids) < len(expected["greedy_tokens"]):
        (_, logits), _ = pager.feed([token_ids[-1:], []], pad_to=PADDED)
        token_ids.append(int(logits[-1].argmax()))
    assert token_ids == expected["greedy_tokens"].tolist()


def logits_of_row_0(pager, expected):
    """The row's last token once more: rewound and fed again, it says the same."""
    pager.rewind(0, 1)
    (_, logits), _ = pager.feed([expected["input_ids"][0, -1:].tolist(), []], pad_to=PADDED)
    assert_close(logits[-1], expected["logits"][0, -1])
    return logits


@pytest.mark.parametrize(("name", "page_size"), [("mistral-swa", 1), ("mistral-swa", 16), ("llama", 32)])
def test_whatever_the_page_size(name, page_size):
    expected = read_golden(name)
    pager = Pager(TINY / name, num_rows=2, max_len=40, page_size=page_size)
    for b, (_, logits) in enumerate(in_cuts(pager, expected["input_ids"], CHUNKS)):
        assert_close(logits, expected["logits"][b])


def test_a_run_within_the_original_length_uses_the_short_factors():
    """Longrope has two sets; which one it is holds for a run, so the same tokens get other logits in a longer one."""
    expected = read_golden("phi3-longrope")
    short = Pager(TINY / "phi3-longrope", num_rows=2, max_len=16, page_size=4, for_run=16)
    for (_, logits), wanted in zip(
        short.feed(expected["short_input_ids"].tolist()), expected["short_logits"], strict=True
    ):
        assert_close(logits, wanted)
    assert short.config.for_run(17) == short.config
    assert short.config != Pager(TINY / "phi3-longrope", num_rows=1, max_len=24, page_size=4).config
