"""Host. Token shards: many conversations in one small file, whose reader believes nothing that it has not checked.

A shard is a NumPy archive (.npz, no pickles): the records' tokens end to end, their lengths, how many of each are the
prompt (no loss is taken there), their kinds, and a JSON text that says what made them.
"""

import json
import os
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import WeightsError

KINDS = ("chat", "code", "json", "editing", "summary")
FORMAT = "jaxspec-tokens-1"
_ARRAYS = ("token_ids", "lengths", "prompt_lengths", "kinds", "header")


@dataclass(frozen=True)
class Record:
    """One conversation: the prompt's tokens and the answer's, end to end."""

    token_ids: np.ndarray  # i32[length]
    num_prompt: int  # the first so many are the prompt
    kind: str  # one of KINDS


@dataclass(frozen=True)
class Corpus(Sequence[Record]):
    """Many records, as they lie in the shards."""

    token_ids_N: np.ndarray  # u16 or u32: all records, end to end
    starts: np.ndarray  # i64[records + 1]
    num_prompts: np.ndarray  # i64[records]
    kinds: np.ndarray  # u8[records], into KINDS

    def __len__(self) -> int:
        return len(self.num_prompts)

    def __getitem__(self, index):  # the Sequence protocol has slices too; here there are none
        start, end = int(self.starts[index]), int(self.starts[index + 1])
        return Record(
            token_ids=self.token_ids_N[start:end].astype(np.int32),
            num_prompt=int(self.num_prompts[index]),
            kind=KINDS[int(self.kinds[index])],
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_N)


def write_shard(path: Path, records: Iterable[Record], *, vocab_size: int, about: dict[str, Any]) -> int:
    """Write records as one shard, whole or not at all.

    Args:
        path: the file, replaced if it is there.
        records: at least one.
        vocab_size: of the tokenizer; u16 holds ids of up to 65536.
        about: JSON values that say how the records came to be.

    Returns:
        Its tokens.
    """
    records = list(records)
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    token_ids = np.concatenate([record.token_ids for record in records])
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise ValueError(f"token ids must lie in [0, {vocab_size}), got {token_ids.min()}..{token_ids.max()}")
    header = {"format": FORMAT, "vocab_size": vocab_size, "about": about}
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez_compressed(
            file,
            token_ids=token_ids.astype(dtype),
            lengths=np.array([len(record.token_ids) for record in records], np.uint32),
            prompt_lengths=np.array([record.num_prompt for record in records], np.uint32),
            kinds=np.array([KINDS.index(record.kind) for record in records], np.uint8),
            header=np.frombuffer(json.dumps(header).encode(), np.uint8),
        )
    os.replace(partial, path)
    return len(token_ids)


def read_shard(path: Path, vocab_size: int | None = None) -> Corpus:
    """A shard, checked.

    Args:
        vocab_size: of the model that is to read it; None takes the file's word.

    Raises:
        WeightsError: it is no shard, is cut off, contradicts itself, or holds ids of another vocabulary.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in _ARRAYS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{path} is no token shard ({str(error)[:200]}); make it again") from error

    def refuse(what: str) -> WeightsError:
        return WeightsError(f"token shard {path}: {what}; make it again")

    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind != "u":
            raise refuse(f"{name} must be a row of unsigned integers, got {array.dtype}{list(array.shape)}")
    try:
        header = json.loads(arrays["header"].tobytes())
        stated = header["vocab_size"]
        is_known = header["format"] == FORMAT and type(stated) is int
    except (ValueError, KeyError, TypeError):
        is_known, stated = False, 0
    if not is_known:
        raise refuse(f"its header is not of format {FORMAT}")
    token_ids, lengths = arrays["token_ids"], arrays["lengths"].astype(np.int64)
    num_prompts, kinds = arrays["prompt_lengths"].astype(np.int64), arrays["kinds"]
    if not len(lengths) == len(num_prompts) == len(kinds) or not len(lengths):
        raise refuse(f"{len(lengths)} lengths, {len(num_prompts)} prompt lengths and {len(kinds)} kinds must be equal")
    if int(lengths.sum()) != len(token_ids):
        raise refuse(f"its lengths add up to {int(lengths.sum())}, it holds {len(token_ids)} tokens")
    if (num_prompts > lengths).any() or (lengths == 0).any() or (kinds >= len(KINDS)).any():
        raise refuse("a record is empty, has a longer prompt than text, or is of an unknown kind")
    size = stated if vocab_size is None else vocab_size
    if stated != size or int(token_ids.max()) >= size:
        raise refuse(f"it holds ids up to {int(token_ids.max())} of a vocabulary of {stated}, the model's is {size}")
    return Corpus(token_ids, np.concatenate([[0], np.cumsum(lengths)]), num_prompts, kinds.astype(np.uint8))


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a folder, in order."""
    return sorted(folder.glob("tokens-*.npz"))


def read_corpus(folder: Path, vocab_size: int | None = None, max_records: int | None = None) -> Corpus:
    """Every shard of a folder as one corpus, or the first records of it.

    Raises:
        WeightsError: there is none, or one is unsound.
    """
    paths = shard_paths(folder)
    if not paths:
        raise WeightsError(f"{folder} holds no token shards (tokens-*.npz); run python -m jaxspec.train.data first")
    parts = [read_shard(path, vocab_size) for path in paths]
    lengths = np.concatenate([np.diff(part.starts) for part in parts])[:max_records]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Corpus(
        np.concatenate([part.token_ids_N for part in parts])[: starts[-1]],
        starts,
        np.concatenate([part.num_prompts for part in parts])[:max_records],
        np.concatenate([part.kinds for part in parts])[:max_records],
    )
