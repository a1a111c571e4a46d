"""Host. Tokens are matched by their text, one to one; T16: paddings of one vocabulary are told from another one."""

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from jaxspec.errors import ConfigError
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.text.vocab_mapping import Vocabulary, align_copies, map_vocabularies, vocabulary_of

TARGET = Vocabulary({"a": 0, "b": 1, "x": 2, "y": 3, "z": 4}, 5, 0)
DRAFT = Vocabulary({"a": 0, "b": 1, "u": 2, "v": 3}, 4, 2)


def test_shared_tokens_map_and_others_are_unknown():
    mapping = map_vocabularies(TARGET, DRAFT)
    assert mapping.target_to_draft_V.tolist() == [0, 1, 2, 2, 2]
    assert mapping.draft_to_target.tolist() == [0, 1, 0, 0]
    assert mapping.is_shared_V.tolist() == [True, True, False, False, False]
    assert mapping.is_shared_draft.tolist() == [True, True, False, False]
    assert mapping.num_shared == 2
    assert mapping.target_to_draft_V.dtype == np.int32


def test_marks_of_a_space_are_spaces():
    target = Vocabulary({"\u0120cat": 0, "cat": 1, "\u0120dog": 2}, 3, 1, None, ("\u0120",))
    draft = Vocabulary({"<unk>": 0, "\u2581dog": 1, "\u2581cat": 2, "cat": 3}, 4, 0, None, ("\u2581",))
    mapping = map_vocabularies(target, draft)
    assert mapping.target_to_draft_V.tolist() == [2, 3, 1]
    assert mapping.draft_to_target.tolist() == [1, 2, 0, 1]


def test_of_several_with_one_text_the_first_id_counts_and_pairs_are_one_to_one():
    target = Vocabulary({"\u2581a": 0, "\u0120a": 1, "b": 2}, 3, 2, None, ("\u2581", "\u0120"))
    draft = Vocabulary({"b": 0, "\u2581a": 1}, 2, 0, None, ("\u2581",))
    mapping = map_vocabularies(target, draft)
    assert mapping.is_shared_V.tolist() == [True, False, True]
    assert mapping.target_to_draft_V.tolist() == [1, 0, 0]
    shared = np.flatnonzero(mapping.is_shared_V)
    assert mapping.draft_to_target[mapping.target_to_draft_V[shared]].tolist() == shared.tolist()


def test_ids_beyond_a_model_are_no_tokens():
    mapping = map_vocabularies(TARGET._replace(size=1), DRAFT)
    assert mapping.is_shared_V.tolist() == [True]
    assert mapping.is_shared_draft.tolist() == [True, False, False, False]


def test_what_stands_for_the_unknown():
    """unk, 0 too; else the end of text; else an error that names the side."""
    assert map_vocabularies(TARGET, DRAFT._replace(unk_token_id=None, eos_token_id=3)).target_to_draft_V[4] == 3
    assert map_vocabularies(TARGET, DRAFT._replace(unk_token_id=0, eos_token_id=3)).target_to_draft_V[4] == 0
    assert map_vocabularies(TARGET, DRAFT._replace(unk_token_id=9, eos_token_id=3)).target_to_draft_V[4] == 3
    with pytest.raises(ConfigError, match="the draft's tokenizer"):
        map_vocabularies(TARGET, DRAFT._replace(unk_token_id=None))
    with pytest.raises(ConfigError, match="the target's tokenizer"):
        map_vocabularies(TARGET._replace(unk_token_id=None), DRAFT)


def test_nothing_shared_is_an_error_and_little_is_warned_about(caplog):
    map_vocabularies(TARGET, DRAFT)
    assert "share 2 tokens only" in caplog.text
    with pytest.raises(ConfigError, match="share no token"):
        map_vocabularies(TARGET, Vocabulary({"q": 0}, 1, 0))


def test_a_hundred_shared_are_enough(caplog):
    ids = {str(number): number for number in range(100)}
    map_vocabularies(Vocabulary(ids, 100, 0), Vocabulary(ids, 100, 0))
    assert caplog.records == []


def wordlevel(words, **kw):
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, **kw)))


def test_a_tokenizers_side_is_read_from_it():
    side = vocabulary_of(wordlevel(["\u0120a", "a", "?"], unk_token="?"), 7)
    assert side == ({"\u0120a": 0, "a": 1, "?": 2}, 7, 2, None, ("\u0120", "\u2581"))  # " a" is unknown to it
    byte_level = tokenizers.Tokenizer(models.BPE({"\u0120": 0, "a": 1, "\u0120a": 2}, [("\u0120", "a")]))
    byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert vocabulary_of(Tokenizer(byte_level), 3).space_marks == ("\u0120",)
    sentences = tokenizers.Tokenizer(models.BPE({"\u2581": 0, "a": 1, "\u2581a": 2}, [("\u2581", "a")]))
    sentences.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    assert vocabulary_of(Tokenizer(sentences), 3).space_marks == ("\u2581",)


REAL = {f"t{number}": number for number in range(100)}


def test_paddings_of_one_vocabulary_agree():
    assert align_copies(Vocabulary(REAL, 128), Vocabulary(REAL, 128)) is None
    mapping = align_copies(Vocabulary(REAL, 128), Vocabulary(REAL, 112))
    assert mapping.is_shared_V.tolist() == [True] * 100 + [False] * 28
    assert mapping.target_to_draft_V[:100].tolist() == list(range(100))
    assert (mapping.target_to_draft_V[100:] == 0).all()
    assert mapping.is_shared_draft.tolist() == [True] * 100 + [False] * 12
    # Tokens that only one side has are no contradiction, and are not drafted.
    more = Vocabulary(REAL | {"<extra>": 100}, 112)
    assert align_copies(Vocabulary(REAL, 128), more).num_shared == 100


def test_a_swapped_token_is_refused_showing_the_first():
    swapped = REAL | {"t7": 60, "t60": 7}
    for size in (112, 128):
        with pytest.raises(ConfigError, match="id 7 is 't7' in the target and 't60' in the draft"):
            align_copies(Vocabulary(REAL, 128), Vocabulary(swapped, size))
