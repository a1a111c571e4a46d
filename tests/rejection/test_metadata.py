"""Host. The flattened view of ragged drafts: worked examples, and padding that belongs to nobody."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rejection.metadata import expand_batch_to_tokens, make_metadata
from jaxspec.rejection.rows import draft_histories, parse_output

make = jax.jit(make_metadata, static_argnames="max_drafts")


def ints(values):
    return jnp.asarray(values, jnp.int32)


def test_the_worked_example():
    """behaviours.md 2.4: prompt chunks and decoding rows in one batch."""
    metadata = make(ints([3, 0, 2, 0, 1]), ints([4, 104, 107, 207, 209]), max_drafts=6)
    assert metadata.cu_num_draft_tokens_B.tolist() == [3, 3, 5, 5, 6]
    assert metadata.cu_num_sampled_tokens_B.tolist() == [4, 5, 8, 9, 11]
    assert metadata.logits_indices_R.tolist() == [0, 1, 2, 3, 103, 104, 105, 106, 206, 207, 208]
    assert metadata.target_logits_indices_N.tolist() == [0, 1, 2, 5, 6, 9]
    assert metadata.bonus_logits_indices_B.tolist() == [3, 4, 7, 8, 10]
    assert metadata.target_rows_N.tolist() == [0, 1, 2, 104, 105, 207]
    assert metadata.bonus_rows_B.tolist() == [3, 103, 106, 206, 208]


@pytest.mark.parametrize("seed", range(20))
def test_index_arrays_against_plain_lists(seed):
    rng = np.random.default_rng(seed)
    num_rows, max_drafts = 6, 30
    counts = rng.integers(0, 5, num_rows) * (rng.random(num_rows) < 0.7)
    ends = np.cumsum(counts + 1 + rng.integers(0, 50, num_rows))
    spare = max_drafts - int(counts.sum())
    metadata = make(ints(counts), ints(ends), max_drafts=max_drafts)

    gathered, targets, bonuses, rows, offsets = [], [], [], [], []
    for row, (count, end) in enumerate(zip(counts, ends, strict=True)):
        for place in range(count + 1):
            if place < count:
                targets.append(len(gathered))
                rows.append(row)
                offsets.append(place)
            else:
                bonuses.append(len(gathered))
            gathered.append(int(end) - int(count) - 1 + place)
    assert metadata.logits_indices_R.tolist() == gathered + [-1] * spare
    assert metadata.target_logits_indices_N.tolist() == targets + [-1] * spare
    assert metadata.bonus_logits_indices_B.tolist() == bonuses
    assert metadata.row_N.tolist() == rows + [num_rows] * spare
    assert metadata.offset_N.tolist() == offsets + [-1] * spare
    assert metadata.target_rows_N.tolist() == [gathered[index] for index in targets] + [-1] * spare
    assert metadata.bonus_rows_B.tolist() == [gathered[index] for index in bonuses]


def test_padding_does_not_join_the_last_request():
    """B3 of behaviours.md: a request bucket that is exactly full, and drafts rejected in the first request."""
    metadata = make(ints([2, 2]), None, max_drafts=8)
    assert metadata.row_N.tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    counts = jax.ops.segment_sum(jnp.ones(8, jnp.int32), metadata.row_N, num_segments=3)
    assert counts.tolist() == [2, 2, 4]


def test_no_drafts_at_all():
    metadata = make(ints([0, 0]), ints([5, 9]), max_drafts=0)
    assert metadata.row_N.shape == metadata.target_rows_N.shape == (0,)
    assert metadata.bonus_rows_B.tolist() == [4, 8]


def test_a_decode_rounds_rows_are_the_first_of_each_dense_block():
    counts, num_positions = [1, 3, 0], 4
    ends = ints([num_positions * row + count + 1 for row, count in enumerate(counts)])
    metadata = make(ints(counts), ends, max_drafts=9)
    assert metadata.target_rows_N.tolist()[:4] == [0, 4, 5, 6]
    assert metadata.bonus_rows_B.tolist() == [1, 7, 8]


def test_values_expand_to_tokens():
    values, ends = jnp.asarray([10.0, 0.0, 30.0], jnp.float32), ints([2, 5, 6])
    assert expand_batch_to_tokens(values, ends, 6).tolist() == [10, 10, 0, 0, 0, 30]
    replaced = expand_batch_to_tokens(values, ends, 8, replace_from=0, replace_to=1, fill=-1)
    assert replaced.tolist() == [10, 10, 1, 1, 1, 30, -1, -1]
    assert expand_batch_to_tokens(ints([7, 8, 9]), ints([0, 2, 2]), 3, fill=5).tolist() == [8, 8, 5]


def test_rows_are_parsed_without_padding_and_without_foreign_ids():
    rows = np.array([[10, 20, -1, -1], [-1, -1, -1, -1], [5, 100, 7, 101]])
    assert parse_output(rows, vocab_size=100) == [[10, 20], [], [5, 7]]


def test_histories_hold_the_outputs_and_the_drafts_before():
    assert draft_histories([[5], [6, 7], [8]], [[10, 11], [], [12]]) == [[5], [5, 10], [8]]
