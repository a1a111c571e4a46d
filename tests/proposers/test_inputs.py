"""Host. The packed layout of a first pass, against a token-by-token walk and cases written out by hand."""

import numpy as np

from jaxspec.proposers.inputs import first_pass, kept_tokens, next_token_ids, padded_samples


def walk(tokens, positions, lens, rejected, new, *, pad_id, num_masks, mask_id, shift):
    """The same, one slot at a time."""
    out, samples, starts, at = [], [], [0], 0
    for row, length in enumerate(lens):
        fed = list(zip(tokens[at : at + length], positions[at : at + length], strict=True))
        kept = fed[: length - rejected[row]]
        ids = [*[token for token, _ in kept[shift:]], new[row]]
        for place, token in enumerate(ids):
            out.append((token, positions[at] + place, False, False))
        samples.append(len(out) - 1)
        for mask in range(num_masks):
            out.append((mask_id, positions[at] + len(ids) + mask, False, True))
            samples.append(len(out) - 1)
        out += [(pad_id, 0, True, False)] * rejected[row]
        starts.append(len(out))
        at += length
    return [list(column) for column in zip(*out, strict=True)], samples, starts


def test_any_batch_is_laid_out_as_slot_by_slot():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lens = rng.integers(1, 7, 3).tolist()
        rejected = [int(rng.integers(0, length)) for length in lens]
        starts = rng.integers(0, 50, 3)
        tokens = rng.integers(0, 100, sum(lens)).tolist()
        positions = np.concatenate([start + np.arange(n) for start, n in zip(starts, lens, strict=True)]).tolist()
        options = {"pad_id": 0, "num_masks": int(rng.integers(0, 4)), "mask_id": -2, "shift": bool(rng.integers(2))}
        found = first_pass(tokens, positions, lens, rejected, [7, 8, 9], **options)
        columns, samples, ends = walk(tokens, positions, lens, rejected, [7, 8, 9], **options)
        arrays = (found.token_ids_T, found.positions_T, found.is_rejected_T, found.is_mask_T)
        assert [array.tolist() for array in arrays] == columns
        assert (found.samples_n.tolist(), found.starts_b.tolist()) == (samples, ends)


def test_a_plain_shift_keeps_lengths_and_positions():
    found = first_pass([5, 6, 7], [3, 4, 5], [3], [0], [8], pad_id=0, shift=True)
    assert (found.token_ids_T.tolist(), found.positions_T.tolist()) == ([6, 7, 8], [3, 4, 5])
    assert found.samples_n.tolist() == [2]


def test_the_last_token_of_a_row():
    tokens, counts = next_token_ids(
        [[4, 9, -1], [4, 50, -1], [-1, -1, -1], [4, 5, 6]], [False, False, False, True], [1, 2, 3, 4], 50
    )
    assert tokens.tolist() == [9, 4, 3, 4]
    assert counts.tolist() == [2, 1, 0, 0]


def test_without_padding_only_kept_tokens_are_fed():
    starts, indices = kept_tokens([2, 3], [0, 2])
    assert (starts.tolist(), indices.tolist()) == ([0, 2, 3], [0, 1, 2])


def test_with_padding_only_the_sample_moves():
    rejected, samples, starts = padded_samples([4, 1, 2], [3, 0, 1], [2, 1, 2])
    assert (rejected.tolist(), samples.tolist(), starts.tolist()) == ([2, 0, 0], [1, 4, 6], [0, 4, 5, 7])
