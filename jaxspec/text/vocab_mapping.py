"""Host. Two vocabularies side by side: which tokens both have, and how ids of the one read in the other."""

import logging
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxspec.errors import ConfigError
from jaxspec.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SPACE_MARKS = ("\u0120", "\u2581")  # of byte-level and of sentencepiece vocabularies
FEW_SHARED = 100


class VocabMapping(NamedTuple):
    """The shared tokens of a target's vocabulary and a draft's, one to one.

    target_to_draft_V: i32, the draft's id of the same token, else the id that stands for what it does not know.
    is_shared_V: bool, by the target's ids. draft_to_target: i32, the same from the draft's side; is_shared_draft: bool.
    """

    target_to_draft_V: np.ndarray
    is_shared_V: np.ndarray
    draft_to_target: np.ndarray
    is_shared_draft: np.ndarray

    @property
    def num_shared(self) -> int:
        """Tokens that can be drafted."""
        return int(self.is_shared_V.sum())


class Vocabulary(NamedTuple):
    """One side: its tokens' ids, how many its model has, the ids for what it does not know, its marks of a space."""

    ids: Mapping[str, int]
    size: int
    unk_token_id: int | None = None
    eos_token_id: int | None = None
    space_marks: tuple[str, ...] = ()


def vocabulary_of(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """A tokenizer's, for a model with `size` ids."""
    return Vocabulary(
        tokenizer.vocabulary, size, tokenizer.unk_token_id, tokenizer.eos_token_id, _space_marks(tokenizer)
    )


def _space_marks(tokenizer: Tokenizer) -> tuple[str, ...]:
    """What a token of " a" begins with in place of the space; both known marks where that does not tell."""
    for token_id in tokenizer.encode(" a", add_special_tokens=False):
        token = tokenizer.id_to_token(token_id) or ""
        for mark in SPACE_MARKS:
            if token.startswith(mark):
                return (mark,)
    return SPACE_MARKS


def map_vocabularies(target: Vocabulary, draft: Vocabulary) -> VocabMapping:
    """Match tokens by their text, marks of a space read as a space.

    Of several tokens with one text the first id counts, and ids beyond a model's are left out, so that what is shared
    is shared one to one. What is not shared reads as the other side's unknown token, else its end of text.

    Raises: ConfigError where nothing is shared, or a side has neither of those two tokens.

    >>> mapping = map_vocabularies(Vocabulary({"a": 0, "b": 1}, 2, 0), Vocabulary({"b": 0, "u": 1}, 2, 1))
    >>> mapping.target_to_draft_V.tolist(), mapping.draft_to_target.tolist()
    ([1, 0], [1, 0])
    """
    of_target, of_draft = _by_text(target), _by_text(draft)
    pairs = [(token_id, of_draft[text]) for text, token_id in of_target.items() if text in of_draft]
    if not pairs:
        raise ConfigError(
            "the draft's vocabulary and the target's share no token, so that nothing can be drafted; take another draft"
        )
    if len(pairs) < FEW_SHARED:
        logger.warning("draft and target share %d tokens only; most drafts will be rejected", len(pairs))
    return _tables(target.size, draft.size, pairs, _stand_in(target, "target"), _stand_in(draft, "draft"))


def align_copies(target: Vocabulary, draft: Vocabulary) -> VocabMapping | None:
    """The mapping of two paddings of one vocabulary, or None where they are equal; padded ids are never drafted.

    Raises: ConfigError where an id that both have means another token in each.
    """
    names = [{token_id: token for token, token_id in side.ids.items()} for side in (target, draft)]
    shared = sorted(names[0].keys() & names[1].keys())
    for token_id in shared:
        if names[0][token_id] != names[1][token_id]:
            raise ConfigError(
                f"the draft's vocabulary is not the target's: id {token_id} is {names[0][token_id]!r} in the target "
                f"and {names[1][token_id]!r} in the draft; take a draft that shares the tokenizer, or set "
                "use_heterogeneous_vocab"
            )
    if target.size == draft.size:
        return None
    pairs = [(token_id, token_id) for token_id in shared if token_id < min(target.size, draft.size)]
    if not pairs:
        raise ConfigError("the draft's vocabulary and the target's share no token; take another draft")
    # A padded id can hardly be in a text; any token may stand for it.
    stand_ins = [
        next((one for one in (side.unk_token_id, side.eos_token_id) if one is not None and one < side.size), 0)
        for side in (target, draft)
    ]
    return _tables(target.size, draft.size, pairs, *stand_ins)


def _tables(
    target_size: int, draft_size: int, pairs: list[tuple[int, int]], target_unknown: int, draft_unknown: int
) -> VocabMapping:
    target_ids, draft_ids = np.array(pairs).T
    target_to_draft_V = np.full(target_size, draft_unknown, np.int32)
    target_to_draft_V[target_ids] = draft_ids
    draft_to_target = np.full(draft_size, target_unknown, np.int32)
    draft_to_target[draft_ids] = target_ids
    is_shared_V, is_shared_draft = np.zeros(target_size, bool), np.zeros(draft_size, bool)
    is_shared_V[target_ids] = is_shared_draft[draft_ids] = True
    return VocabMapping(target_to_draft_V, is_shared_V, draft_to_target, is_shared_draft)


def _by_text(side: Vocabulary) -> dict[str, int]:
    found: dict[str, int] = {}
    for token, token_id in sorted(side.ids.items(), key=lambda item: item[1]):
        for mark in side.space_marks:
            token = token.replace(mark, " ")
        if token_id < side.size:
            found.setdefault(token, token_id)
    return found


def _stand_in(side: Vocabulary, name: str) -> int:
    for token_id in (side.unk_token_id, side.eos_token_id):
        if token_id is not None and 0 <= token_id < side.size:
            return token_id
    raise ConfigError(
        f"use_heterogeneous_vocab needs an unknown or an end-of-text token in the {name}'s tokenizer, for tokens that "
        "only the other has; name one in its tokenizer_config.json"
    )
