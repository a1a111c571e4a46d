"""Host. A reduced vocabulary: the tokens that answers are made of."""

from pathlib import Path

import numpy as np

from jaxspec.train.data.shards import Corpus
from jaxspec.weights.checkpoint import open_tensors


def commonest_tokens(corpus: Corpus, records: np.ndarray, size: int, vocab_size: int) -> np.ndarray:
    """i32[size], ascending: the tokens that the answers of these records hold most often; of equals the lower ids."""
    counts = np.zeros(vocab_size, np.int64)
    for index in records:
        record = corpus[int(index)]
        counts += np.bincount(record.token_ids[record.num_prompt :], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def coverage(corpus: Corpus, records: np.ndarray, target_ids: np.ndarray, vocab_size: int) -> float:
    """The share of the answers' tokens that are among these."""
    is_kept = np.zeros(vocab_size, bool)
    is_kept[target_ids] = True
    answers = [corpus[int(index)].token_ids[corpus[int(index)].num_prompt :] for index in records]
    return float(is_kept[np.concatenate(answers)].mean())


def drafted_tokens(folder: Path) -> np.ndarray | None:
    """i32, ascending: the tokens that a trained EAGLE-3 head drafts; None: all of its target's."""
    with open_tensors(folder) as reader:
        if "d2t" not in reader.tensors:
            return None
        offsets = np.asarray(reader.read("d2t"))
    return (offsets + np.arange(len(offsets))).astype(np.int32)
