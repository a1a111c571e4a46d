"""Host. T5: the one commit function cuts ids, text and finish at the same token, however rounds cut the answer."""

import itertools

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxspec import SamplingParams
from jaxspec.engine.commit import Progress, commit_block
from jaxspec.text.detokenizer import IncrementalDetokenizer
from jaxspec.text.tokenizer import Tokenizer

WORD, END, EOS = 256, 257, 258  # the tokens "stop", " end" and a special end of text; below them ids are bytes
BLOCKS = (1, 2, 3, 5, 8, 9)
PROMPT = list(b"Once ")


@pytest.fixture(scope="module")
def tokenizer():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    vocabulary = {chr(b) if b in printable else chr(next(others)): b for b in range(256)}
    assert set(vocabulary) == set(alphabet)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary | {"stop": WORD, "Ġend": END}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    assert backend.token_to_id("<|end|>") == EOS
    return Tokenizer(backend)


def run(tokenizer, ids, block, max_output=100, eos=(), **params):
    """(progress, cuts) of an answer committed in blocks until it ends."""
    params = SamplingParams(**{"max_tokens": None, "temperature": 0.0} | params)
    detokenizer = None
    if tokenizer is not None and params.detokenize:
        detokenizer = IncrementalDetokenizer(tokenizer, PROMPT, params.skip_special_tokens)
    progress = Progress(params, frozenset(eos), max_output, detokenizer)
    cuts = []
    for start in range(0, len(ids), block):
        if progress.finish_reason is not None:
            break
        cuts.append(commit_block(progress, ids[start : start + block]))
    return progress, cuts


def text_ids(text: str) -> list[int]:
    return list(text.encode())


# name: (ids, params, expected (number of ids, text, finish_reason, stop_reason))
TABLE = {
    "stop is the block's first token": ([WORD, *text_ids("abc")], {"stop": "stop"}, (1, "", "stop", "stop")),
    "stop in its middle": ([*text_ids("abc"), WORD, *text_ids("defg")], {"stop": "stop"}, (4, "abc", "stop", "stop")),
    "stop is its last token": ([*text_ids("abcdefg"), WORD], {"stop": "stop"}, (8, "abcdefg", "stop", "stop")),
    "stop across two tokens": ([*text_ids("ab"), WORD, END, 65], {"stop": "op e"}, (4, "abst", "stop", "op e")),
    "stop across blocks": ([*text_ids("abcdefgstophi")], {"stop": "stop"}, (11, "abcdefg", "stop", "stop")),
    "stop of one character": (text_ids("abcdefghij"), {"stop": "i"}, (9, "abcdefgh", "stop", "i")),
    "stop shown": ([97, WORD, 98], {"stop": "to", "include_stop_str_in_output": True}, (2, "asto", "stop", "to")),
    "a character that ends the stop": (text_ids("ab é x"), {"stop": "é"}, (5, "ab ", "stop", "é")),
    "a stop behind half a character": (text_ids("a😀b!c"), {"stop": "😀b"}, (6, "a", "stop", "😀b")),
    "of two stops the first complete": (text_ids("xabcd"), {"stop": ["abcd", "bc"]}, (4, "xa", "stop", "bc")),
    "a stop that nearly comes": (text_ids("stostostop!"), {"stop": "stop"}, (10, "stosto", "stop", "stop")),
    "a stop that never comes": (text_ids("sto"), {"stop": "stop", "max_tokens": 3}, (3, "sto", "length", None)),
    "cap before the stop": ([97, 98, WORD], {"stop": "stop", "max_tokens": 2}, (2, "ab", "length", None)),
    "cap at the stop": ([97, 98, WORD, 99], {"stop": "stop", "max_tokens": 3}, (3, "ab", "stop", "stop")),
    "cap after the stop": ([97, WORD, 98, 99], {"stop": "stop", "max_tokens": 3}, (2, "a", "stop", "stop")),
    "cap inside a character": (text_ids("ab😀"), {"max_tokens": 4}, (4, "ab�", "length", None)),
    "cap inside a stop": (text_ids("abstop"), {"stop": "stop", "max_tokens": 4}, (4, "abst", "length", None)),
    "EOS": ([97, EOS, 98], {}, (2, "a", "stop", None)),
    "EOS first": ([EOS, 98], {}, (1, "", "stop", None)),
    "EOS at the cap": ([97, EOS, 98], {"max_tokens": 2}, (2, "a", "stop", None)),
    "EOS ignored": ([97, EOS, 98], {"ignore_eos": True, "max_tokens": 3}, (3, "ab", "length", None)),
    "EOS before min_tokens": ([97, EOS, 98, EOS], {"min_tokens": 3}, (4, "ab", "stop", None)),
    "EOS at min_tokens": ([97, 98, EOS, 99], {"min_tokens": 3}, (3, "ab", "stop", None)),
    "EOS and stop id": ([97, EOS], {"stop_token_ids": [EOS]}, (2, "a", "stop", None)),
    "stop id": ([97, 98, 99], {"stop_token_ids": [98, 5]}, (2, "a", "stop", 98)),
    "stop id though EOS is ignored": ([97, 98], {"ignore_eos": True, "stop_token_ids": [98]}, (2, "a", "stop", 98)),
    "stop id shown": (
        [97, 98, 99],
        {"stop_token_ids": [98], "include_stop_str_in_output": True},
        (2, "ab", "stop", 98),
    ),
    "stop string before min_tokens": (
        text_ids("stop, stop!"),
        {"stop": "stop", "min_tokens": 6},
        (10, "stop, ", "stop", "stop"),
    ),
    "half a stop, then EOS": ([*text_ids("ast"), EOS, 98], {"stop": "stop"}, (4, "ast", "stop", None)),
    "half a character, then EOS": ([97, *"é".encode()[:1], EOS], {}, (3, "a�", "stop", None)),
    "no text wanted": ([97, 98, EOS], {"detokenize": False}, (3, "", "stop", None)),
}  # fmt: skip


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", TABLE)
def test_the_cut(tokenizer, name, block):
    ids, params, (num_ids, text, finish_reason, stop_reason) = TABLE[name]
    max_output = params.get("max_tokens", 100)
    progress, cuts = run(tokenizer, ids, block, max_output=max_output, eos={EOS}, **params)
    assert progress.token_ids == ids[:num_ids]
    assert progress.text == text
    assert (progress.finish_reason, progress.stop_reason) == (finish_reason, stop_reason)
    assert [token_id for cut in cuts for token_id in cut.token_ids] == progress.token_ids
    assert "".join(cut.text for cut in cuts) == progress.text


def test_the_models_length_caps_as_max_tokens_does(tokenizer):
    progress, _ = run(tokenizer, text_ids("abcdef"), 4, max_output=5, max_tokens=50)
    assert (progress.text, progress.finish_reason) == ("abcde", "length")


def test_nothing_is_shown_that_a_later_token_takes_back(tokenizer):
    """Pieces joined are the text at every step: no half character, no beginning of a stop string."""
    ids = text_ids("a stopwatch 😀 st é stop")
    for block in BLOCKS:
        _, cuts = run(tokenizer, ids, block, stop="stop!")
        shown = list(itertools.accumulate(cut.text for cut in cuts))
        assert all("a stopwatch 😀 st é stop".startswith(text) for text in shown)
        assert shown[-1] == "a stopwatch 😀 st é "


def test_random_answers_do_not_depend_on_blocks(tokenizer):
    rng = np.random.default_rng(0)
    alphabet = [*b"abst op!", WORD, END, EOS, *"é😀".encode()]
    for _ in range(200):
        ids = rng.choice(alphabet, 30).tolist()
        params = {"stop": ["stop", "ab", " "][: rng.integers(0, 4)] or None, "min_tokens": int(rng.integers(0, 8))}
        max_output = int(rng.integers(8, 40))
        outcomes = []
        for block in (1, 4, 9):
            progress, _ = run(tokenizer, ids, block, max_output=max_output, eos={EOS}, **params)
            outcomes.append((progress.token_ids, progress.text, progress.finish_reason, progress.stop_reason))
        assert outcomes[0] == outcomes[1] == outcomes[2]
        assert len(outcomes[0][0]) <= max_output
        assert outcomes[0][2] is not None or len(outcomes[0][0]) == 30


@pytest.mark.parametrize(
    ("given", "eos", "reason"),
    [
        ({"stop_token_ids": [0]}, (), 0),  # an id that is falsy is an id all the same
        ({}, (0,), None),  # EOS has no stop reason
    ],
)
def test_an_id_that_ends_the_answer_outranks_a_stop_string_its_own_text_completes(tokenizer, given, eos, reason):
    params = {"stop": "\x00", "include_stop_str_in_output": True} | given
    progress, _ = run(tokenizer, [65, 0, 66], 3, eos=eos, **params)
    assert (progress.token_ids, progress.finish_reason, progress.stop_reason) == ([65, 0], "stop", reason)
