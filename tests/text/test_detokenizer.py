"""Host. Text as it comes: against decoding everything at each step, over published and hand-made vocabularies."""

import codecs
import contextlib

import numpy as np
import pytest

from jaxspec.text.detokenizer import IncrementalDetokenizer
from jaxspec.text.gguf_vocabulary import build_gguf_tokenizer
from jaxspec.text.tokenizer import Tokenizer

TEXTS = [
    "Hello there, world!",
    " leading space",
    "emoji 😀👩‍👩‍👧‍👦🇩🇪 and more 🚀",
    "你好，世界。今天天气很好，我们去公园吧。",
    "naïve café — “quotes”… ﬁ ½ ∑ 𝔘𝔫𝔦",
    "한국어와 日本語 and हिन्दी and עברית",
    "line\n\n\tindented\r\n  x",
    "a real \ufffd sign and then text",
    "ends with \ufffd",
    "\x00\x01 control",
]


def whole_characters(tokenizer, ids, skip=False):
    """The text whose bytes are settled, by way of Python's own UTF-8 decoder over the byte-level alphabet."""
    spelling = byte_of_character()
    raw = b""
    for token_id in ids:
        token = tokenizer.id_to_token(token_id)
        if token is not None and not (skip and token_id in tokenizer.special_ids):
            raw += bytes(spelling[c] for c in token) if all(c in spelling for c in token) else token.encode()
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


def byte_of_character():
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def check_byte_level(tokenizer, prompt, output, skip):
    """Every step shows just what is settled, except that up to three signs may still wait for the next character."""
    base = tokenizer.decode(prompt, skip_special_tokens=skip)
    detokenizer, shown = IncrementalDetokenizer(tokenizer, prompt, skip), ""
    for count, token_id in enumerate(output, 1):
        shown += detokenizer.push([token_id])
        settled = whole_characters(tokenizer, [*prompt, *output[:count]], skip)
        waiting = settled.removeprefix(base + shown)
        assert settled == base + shown + waiting
        assert waiting in ("", "\ufffd", "\ufffd\ufffd", "\ufffd\ufffd\ufffd")
    full = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
    assert base + shown + detokenizer.flush() == full
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_published_vocabulary_on_text(smollm2, text, skip):
    prompt = smollm2.encode("<|im_start|>user\nSay it:<|im_end|>\n<|im_start|>assistant\n", False)
    output = smollm2.encode(text, False)
    check_byte_level(smollm2, prompt, output, skip)
    check_byte_level(smollm2, [], output, skip)
    detokenizer = IncrementalDetokenizer(smollm2, prompt, skip)
    assert detokenizer.push(output) + detokenizer.flush() == text


def test_a_character_appears_with_its_last_byte_and_not_before(smollm2):
    ids = smollm2.encode("你😀", False)
    detokenizer = IncrementalDetokenizer(smollm2, [], True)
    steps = [detokenizer.push([token_id]) for token_id in ids]
    assert len(ids) > 2
    assert [step for step in steps if step] == ["你", "😀"]
    assert steps[-1] == "😀"


@pytest.mark.parametrize("skip", [True, False])
def test_published_vocabulary_on_random_ids(smollm2, skip):
    """Bytes that never make a character, special tokens, ids past the vocabulary."""
    rng = np.random.default_rng(0)
    broken = [i for i in range(smollm2.vocab_size) if "\ufffd" in smollm2.decode([i], False)]
    assert len(broken) > 100
    for _ in range(150):
        pools = [
            rng.integers(0, 49152, 30),
            rng.choice(broken, 30),
            rng.integers(0, 17, 30),
            rng.integers(49152, 49200, 30),
        ]
        mixed = [int(pools[kind][i]) for i, kind in enumerate(rng.choice(4, 30, p=[0.3, 0.55, 0.1, 0.05]))]
        length = int(rng.integers(0, 10))
        prompt = mixed[:length]
        if smollm2.decode(prompt, skip).endswith("\ufffd"):
            prompt = [*prompt, *smollm2.encode(" x", False)]
        check_byte_level(smollm2, prompt, mixed[length:], skip)


def test_a_long_run_of_broken_bytes_neither_stalls_nor_slows(smollm2):
    broken = [i for i in range(smollm2.vocab_size) if smollm2.decode([i], False) == "\ufffd"]
    output = np.random.default_rng(1).choice(broken, 1000).tolist()
    check_byte_level(smollm2, smollm2.encode("start", False), output, True)


def test_a_prompt_may_end_inside_a_character(smollm2):
    ids = smollm2.encode("see 你", False)
    assert smollm2.decode(ids[:-1], False).endswith("\ufffd")
    detokenizer = IncrementalDetokenizer(smollm2, ids[:-1], True)
    assert detokenizer.push(ids[-1:]) == "你"


def test_skipped_tokens_do_not_cut_a_character(smollm2):
    ids = smollm2.encode("你", False)
    detokenizer = IncrementalDetokenizer(smollm2, [], True)
    assert detokenizer.push([ids[0], 2, *ids[1:]]) + detokenizer.flush() == "你"


class Sentencepiece:
    """What sentencepiece text ought to be: a byte run shows each character as its bytes complete it."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def text(self, ids):
        """(settled text, number of bytes that still wait)."""
        text, run = "", b""
        for token_id in ids:
            if token_id < 3:  # the special ones
                continue
            if token_id < 259:
                run += bytes([token_id - 3])
                with contextlib.suppress(UnicodeDecodeError):
                    text, run = text + run.decode(), b""
            else:
                piece = self.tokenizer.id_to_token(token_id)
                text, run = text + "\ufffd" * len(run) + piece.replace("▁", " "), b""
        return text, len(run)


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_on_text(sentencepiece, text):
    prompt = sentencepiece.encode("Say it:")
    output = sentencepiece.encode(f"x{text}", False)[1:]
    detokenizer, shown = IncrementalDetokenizer(sentencepiece, prompt), ""
    base = sentencepiece.decode(prompt)
    for count, token_id in enumerate(output, 1):
        shown += detokenizer.push([token_id])
        full = sentencepiece.decode([*prompt, *output[:count]])
        if not full.endswith("\ufffd"):
            assert base + shown == full
    assert base + shown + detokenizer.flush() == sentencepiece.decode([*prompt, *output])


@pytest.mark.parametrize("prompt", [[1], [1, 300], [3 + 10], [300, 3 + 0xE4, 3 + 0xBD, 3 + 0xA0], [1, 259]])
def test_sentencepiece_on_random_ids(sentencepiece, prompt):
    rng, oracle = np.random.default_rng(2), Sentencepiece(sentencepiece)
    characters = ["\n", "é", "你", "😀"]
    for _ in range(200):
        output = []
        while len(output) < 25:
            kind = rng.integers(4)
            if kind == 0:
                output += [3 + byte for byte in rng.choice(characters).encode()]
            elif kind == 1:
                output.append(int(rng.integers(3, 259)))
            else:
                output.append(
                    int(rng.integers(0, 3) if rng.random() < 0.2 else rng.integers(259, sentencepiece.vocab_size))
                )
        base = oracle.text(prompt)[0]
        detokenizer, steps = IncrementalDetokenizer(sentencepiece, prompt), [base]
        for count, token_id in enumerate(output, 1):
            steps.append(steps[-1] + detokenizer.push([token_id]))
            settled, waiting = oracle.text([*prompt, *output[:count]])
            least = len(settled) - (base == "" and settled.startswith(" "))
            # Of bytes that wait, all but the last three have no more hope.
            assert least <= len(steps[-1]) <= least + max(0, waiting - 3), output[:count]
        settled, waiting = oracle.text([*prompt, *output])
        full = (settled.removeprefix(" ") if base == "" else settled) + "\ufffd" * waiting
        assert steps[-1] + detokenizer.flush() == full
        assert all(full.startswith(step) for step in steps)


def test_the_first_space_of_a_text_goes_and_no_other(sentencepiece_metadata):
    tokenizer = Tokenizer(build_gguf_tokenizer(sentencepiece_metadata), bos_token="<s>")
    ids = tokenizer.encode("the the", False)
    assert IncrementalDetokenizer(tokenizer, [1]).push(ids) == "the the"
    assert IncrementalDetokenizer(tokenizer, [1, *ids]).push(ids) == " the the"
    newline = [3 + 10]
    assert IncrementalDetokenizer(tokenizer, [1]).push(newline + ids) == "\n the the"
