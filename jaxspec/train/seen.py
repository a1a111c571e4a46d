"""Host. What the frozen target sees of a corpus: worked out once, kept on disk, and read by every step that wants it.

One row a token: the likeliest next token, the state after the final norm, and the streams that a drafter reads.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec.train.data.shards import Corpus
from jaxspec.train.target import FrozenTarget

_PART = 256  # records a file: what is lost when the work is interrupted
_TOKENS_AT_ONCE = 2048
_LENGTH_STEP = 64  # rows are padded to a multiple of it, so that few shapes are compiled


@dataclass(frozen=True)
class Seen:
    """Rows of all tokens of a corpus, in files of a few records each."""

    parts: Sequence[np.ndarray]  # structured, see `row_dtype`
    first_tokens: np.ndarray  # i64[parts]: where each begins

    def rows(self, start: int, end: int) -> np.ndarray:
        """Rows of tokens of one record."""
        part = int(np.searchsorted(self.first_tokens, start, side="right")) - 1
        return self.parts[part][start - self.first_tokens[part] : end - self.first_tokens[part]]


def row_dtype(hidden_size: int, num_streams: int, dtype: Any) -> np.dtype:
    """Of a token's row. What NumPy's files cannot name (bfloat16) is kept as unsigned integers of the same bits."""
    kept = np.dtype(dtype) if np.dtype(dtype).kind == "f" else np.dtype(np.uint16)
    return np.dtype(
        [("best", np.int32), ("hidden", kept, (hidden_size,)), ("streams", kept, (num_streams * hidden_size,))]
    )


def see_corpus(
    folder: Path,
    target: FrozenTarget,
    target_weights: Any,
    corpus: Corpus,
    aux_streams: tuple[int, ...],
    *,
    dtype: Any = jnp.bfloat16,
    show_progress: bool = False,
) -> Seen:
    """The target's view of every record; files that are there already are read, not made.

    Args:
        folder: of the cache, which runs over the same corpus and target may share.
        dtype: that states and streams are kept in.
    """
    files = sorted(target.path.iterdir()) if target.path.is_dir() else [target.path]
    files = [(str(one.resolve()), one.stat().st_size, one.stat().st_mtime_ns) for one in files]
    dtypes = [str(leaf.dtype) for leaf in jax.tree.leaves(target_weights)]
    digest = hashlib.sha256(f"{files} {dtypes} {aux_streams} {np.dtype(dtype)}".encode())
    digest.update(corpus.token_ids_N.tobytes())
    digest.update(corpus.starts.tobytes())
    folder = folder / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    look = jax.jit(partial(_look, target, aux_streams, dtype))
    row = row_dtype(target.config.hidden_size, len(aux_streams), dtype)
    parts, firsts = [], range(0, len(corpus), _PART)
    for first in tqdm(firsts, desc="the target reads", disable=not show_progress):
        path = folder / f"{first // _PART:05}.npy"
        if not path.exists():
            partial_path = path.with_suffix(f".{os.getpid()}.partial")
            with partial_path.open("wb") as file:
                np.save(file, _part(corpus, range(first, min(first + _PART, len(corpus))), look, target_weights, row))
            os.replace(partial_path, path)
        parts.append(np.load(path, mmap_mode="r"))
    return Seen(parts, corpus.starts[:-1][::_PART])


def _look(target: FrozenTarget, aux_streams, dtype, weights, token_ids_BT):
    hidden_BTD, streams_BTX = target.see(weights, token_ids_BT, aux_streams)
    best_BT = jnp.argmax(target.logits(weights, hidden_BTD), axis=-1).astype(jnp.int32)
    return best_BT, hidden_BTD.astype(dtype), streams_BTX.astype(dtype)


def _part(corpus: Corpus, records: range, look, weights, row: np.dtype) -> np.ndarray:
    """Rows of some records, which go through the target in batches of about one length."""
    start = corpus.starts[records.start]
    rows = np.empty(int(corpus.starts[records.stop] - start), row)
    lengths = np.diff(corpus.starts)[records.start : records.stop]
    waiting = (records.start + np.argsort(lengths, kind="stable")).tolist()
    while waiting:
        T = -(-int(corpus.starts[waiting[-1] + 1] - corpus.starts[waiting[-1]]) // _LENGTH_STEP) * _LENGTH_STEP
        B = max(1, _TOKENS_AT_ONCE // T)
        taken, waiting = waiting[-B:], waiting[:-B]
        token_ids_BT = np.zeros((B, T), np.int32)
        for b, index in enumerate(taken):
            ids = corpus[index].token_ids
            token_ids_BT[b, : len(ids)] = ids
        best, hidden, streams = jax.device_get(look(weights, token_ids_BT))
        for b, index in enumerate(taken):
            own = slice(int(corpus.starts[index] - start), int(corpus.starts[index + 1] - start))
            length = own.stop - own.start
            rows["best"][own] = best[b, :length]
            rows["hidden"][own] = hidden[b, :length].view(row["hidden"].base)
            rows["streams"][own] = streams[b, :length].view(row["streams"].base)
    return rows
