"""Host. Regular languages as automata written by hand, and a vocabulary of letters to write them with."""

import json
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxspec.text.tokenizer import Tokenizer
from tests.serve.fake import CHAT_TEMPLATE

LETTERS = 'abcdefghij{}:,"0'  # ids 0..15
EOS, MARKER = len(LETTERS), len(LETTERS) + 1  # then two special tokens
MARKER_TEXT = "</think>"


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def byte_level_backend(letters: str = LETTERS) -> tokenizers.Tokenizer:
    """One token a letter, then <eos> and the marker, in the form that nearly all models use."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<eos>", MARKER_TEXT)])
    return backend


def byte_level_tokenizer(letters: str = LETTERS) -> Tokenizer:
    return Tokenizer(byte_level_backend(letters), chat_template=CHAT_TEMPLATE)


def add_byte_level_tokenizer(folder: Path, letters: str = LETTERS) -> Path:
    byte_level_backend(letters).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


@dataclass(frozen=True)
class Automaton:
    """steps: state -> {letter: state}; state 0 is the first; accepting: where a text may end.

    constraint: the same language as a request writes it.
    """

    constraint: dict
    steps: dict[int, dict[str, int]]
    accepting: frozenset[int]

    def state(self, token_ids) -> int | None:
        """After these tokens; None: they are no beginning of a text of the language."""
        state: int | None = 0
        for token_id in token_ids:
            if state is None or not 0 <= token_id < len(LETTERS):
                return None
            state = self.steps[state].get(LETTERS[token_id])
        return state

    def allowed(self, token_ids, eos_ids, ignore_eos: bool = False) -> set[int]:
        """The ids that may follow these."""
        state = self.state(token_ids)
        if state is None:
            return set()
        letters = {LETTERS.index(letter) for letter in self.steps[state]}
        may_end = state in self.accepting and not (ignore_eos and letters)
        return letters | (set(eos_ids) if may_end else set())

    def is_complete(self, token_ids) -> bool:
        """Whether they are a text of the language that no longer one begins with."""
        state = self.state(token_ids)
        return state in self.accepting and not self.steps[state]


# Either letter of a pair at many steps: a model has choices, and few of them.
LOOP = Automaton(
    {"regex": "(ab|ba|cc?d)*e(f|gh)"},
    {
        0: {"a": 1, "b": 2, "c": 3, "e": 5},
        1: {"b": 0},
        2: {"a": 0},
        3: {"c": 4, "d": 0},
        4: {"d": 0},
        5: {"f": 7, "g": 6},
        6: {"h": 7},
        7: {},
    },
    frozenset({7}),
)
# It may end after any letter, and never has to.
OPEN = Automaton(
    {"regex": "[a-d]([e-h][a-d]|[ij])*"},
    {
        0: dict.fromkeys("abcd", 1),
        1: dict.fromkeys("efgh", 2) | dict.fromkeys("ij", 1),
        2: dict.fromkeys("abcd", 1),
    },
    frozenset({1}),
)
CHOICE = Automaton(
    {"choice": ["abc", "abd", "adgi", "b", "bee"]},
    {
        0: {"a": 1, "b": 5}, 1: {"b": 2, "d": 3}, 2: {"c": 9, "d": 9}, 3: {"g": 4}, 4: {"i": 9}, 5: {"e": 6},
        6: {"e": 9}, 9: {},
    },
    frozenset({5, 9}),
)  # fmt: skip


def object_of(key: str, schema: dict) -> dict:
    return {"type": "object", "properties": {key: schema}, "required": [key], "additionalProperties": False}


# {"a":0} and {"a":{"b":0}}, without white space.
NESTED = Automaton(
    {
        "json": object_of("a", {"anyOf": [{"const": 0}, object_of("b", {"const": 0})]}),
        "disable_any_whitespace": True,
    },
    {
        0: {"{": 1}, 1: {'"': 2}, 2: {"a": 3}, 3: {'"': 4}, 4: {":": 5}, 5: {"0": 13, "{": 6}, 6: {'"': 7},
        7: {"b": 8}, 8: {'"': 9}, 9: {":": 10}, 10: {"0": 11}, 11: {"}": 13}, 13: {"}": 14}, 14: {},
    },
    frozenset({14}),
)  # fmt: skip
AUTOMATA = {"loop": LOOP, "open": OPEN, "choice": CHOICE, "nested": NESTED}
