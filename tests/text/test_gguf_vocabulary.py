"""Host. Tokenizers built from GGUF keys: against the tokenizer the keys were taken from, transformers, and by hand."""

import itertools

import numpy as np
import pytest
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxspec.errors import ConfigError
from jaxspec.text.gguf_vocabulary import build_gguf_tokenizer

TEXTS = [
    "",
    " ",
    "   leading and   inner spaces  ",
    "Plain English, with punctuation: it's 1871 & they'll pay $42.50!",
    "x  12 345  6\n 7\t8\r\n\r\n   9",
    "def f(x):\n    if x > 10:\n        return x ** 2\n\n\n# done",
    "naïve café — “quotes” … Köln ÀÉÎ e\u0301 (combining)",
    "你好，世界。今天天气很好 こんにちは 안녕하세요 Привет मानक",
    "😀 👩‍👩‍👧‍👦 🇩🇪 🏳️‍🌈 1️⃣",
    "<|im_start|>user\nhi<|im_end|>\n<|end|><|start|> the<|end|>the",
    "\x00\x01\x7f\x80\u200b\u2028\ufeff\ufffd",
    '{"a": [1, 22, 333, 4444], "b": null}',
    "ALLCAPS mixedCase snake_case kebab-case camelCase2 x1y2z3 ٣٤٥ Ⅷ ½",
    "I'LL don'T 'S 's 'x",
]


def random_texts(seed, count=300):
    rng = np.random.default_rng(seed)
    pools = [
        "abcdeXYZ",
        "     \n\t\r",
        "0123456789",
        "',.!?-_*/{}[]()<>|",
        "éüñçßÀ",
        "你好世界日本",
        "😀🚀👍",
        "\u0301\u200d",
    ]
    for _ in range(count):
        pool = "".join(itertools.compress(pools, rng.random(len(pools)) < 0.5)) or pools[0]
        yield "".join(rng.choice(list(pool), int(rng.integers(1, 40))))


def assert_same(ours, theirs, texts):
    for text in texts:
        mine, other = ours.encode(text, add_special_tokens=False), theirs.encode(text, add_special_tokens=False)
        assert mine.ids == other.ids, (text, mine.tokens, other.tokens)
        assert ours.decode(mine.ids, skip_special_tokens=False) == theirs.decode(mine.ids, skip_special_tokens=False)
        assert ours.decode(mine.ids) == theirs.decode(mine.ids)


def test_gives_back_the_tokenizer_the_keys_came_from(byte_level_backend, byte_level_metadata):
    ours = build_gguf_tokenizer(byte_level_metadata("gpt-2"))
    assert_same(ours, byte_level_backend, [*TEXTS, *random_texts(0)])
    assert ours.get_vocab() == byte_level_backend.get_vocab()


# The models' own splitting, as their tokenizer.json states it; each is checked on the same trained merges.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
OWN_RULES = {
    "smollm": (
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        False,
    ),
    "llama-bpe": ([LLAMA3], True),
    "qwen2": ([QWEN2], False),
}


@pytest.mark.parametrize("pre", OWN_RULES)
def test_words_are_cut_as_the_model_was_taught(byte_level_backend, byte_level_metadata, pre):
    rules, whole_words = OWN_RULES[pre]
    expected = Backend.from_str(byte_level_backend.to_str())
    steps = [pre_tokenizers.Split(Regex(rule), "isolated") if isinstance(rule, str) else rule for rule in rules]
    if isinstance(rules[0], str):
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    expected.pre_tokenizer = pre_tokenizers.Sequence(steps)
    expected.model.ignore_merges = whole_words
    if pre == "qwen2":
        expected.normalizer = normalizers.NFC()
    ours = build_gguf_tokenizer(byte_level_metadata(pre))
    assert_same(ours, expected, [*TEXTS, *random_texts(1)])
    plain = build_gguf_tokenizer(byte_level_metadata("gpt-2"))
    assert any(ours.encode(text).ids != plain.encode(text).ids for text in TEXTS)


def test_llama3_takes_a_word_of_the_vocabulary_whole(byte_level_metadata):
    metadata = byte_level_metadata()
    extended = {
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "qzqz"],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 1],
    }
    whole = len(metadata["tokenizer.ggml.tokens"])
    ids = {
        pre: build_gguf_tokenizer(metadata | extended | {"tokenizer.ggml.pre": pre}).encode("qzqz").ids
        for pre in ("llama-bpe", "tekken", "gpt-2", "qwen2")
    }
    assert ids["llama-bpe"] == ids["tekken"] == [whole]
    assert len(ids["gpt-2"]) == len(ids["qwen2"]) == 4


@pytest.fixture(scope="session")
def convert():
    """transformers' own conversion, a private function that has moved before."""
    pytest.importorskip("transformers")
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer
    except ImportError:
        pytest.skip("this transformers keeps its GGUF conversion elsewhere")

    def run(metadata):
        keys = {"model": "tokenizer_type", "pre": "pre_tokenizer_type", "tokens": "tokens", "scores": "scores",
                "token_type": "token_type", "merges": "merges"}  # fmt: skip
        found = {
            name: metadata[f"tokenizer.ggml.{key}"] for key, name in keys.items() if f"tokenizer.ggml.{key}" in metadata
        }
        return convert_gguf_tokenizer("llama", found)[0]

    return run


def test_published_vocabulary_agrees_with_transformers(smollm2, smollm2_path, convert):
    """Once transformers is given SmolLM's rule for digits, which it does not know."""
    from jaxspec.config.gguf_header import read_gguf_header

    theirs = convert(read_gguf_header(smollm2_path).metadata)
    theirs.pre_tokenizer = pre_tokenizers.Sequence(OWN_RULES["smollm"][0])
    assert_same(smollm2.backend, theirs, [*TEXTS, *random_texts(2)])
    ids = np.random.default_rng(3).integers(0, 49152, (50, 40)).tolist()
    for row in ids:
        assert smollm2.decode(row, False) == theirs.decode(row, skip_special_tokens=False)


def test_sentencepiece_agrees_with_transformers(sentencepiece_metadata, convert):
    theirs = convert(sentencepiece_metadata)
    ours = build_gguf_tokenizer(sentencepiece_metadata)
    texts = [text for text in (*TEXTS, *random_texts(4)) if "<" not in text]
    assert_same(ours, theirs, texts)


def naive_sentencepiece(metadata, text):
    """Merges the best-scored adjacent pair, leftmost first, until none is a piece; unknown characters become bytes."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: index for index, token in enumerate(tokens)}
    pieces = list(("" if text.startswith(" ") else "▁") + text.replace(" ", "▁")) if text else []
    while True:
        joined = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids]
        if not joined:
            break
        _, best = min(joined)
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    found = []
    for piece in pieces:
        found += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return found


def test_sentencepiece_merges_by_score(sentencepiece_metadata):
    ours = build_gguf_tokenizer(sentencepiece_metadata)
    num_bytes = 0
    for text in (*TEXTS, *random_texts(5)):
        if "<" in text or text.startswith(" "):
            continue
        expected = naive_sentencepiece(sentencepiece_metadata, text)
        assert ours.encode(text).ids == expected, text
        num_bytes += sum(3 <= token_id < 259 for token_id in expected)
        assert ours.decode(expected, skip_special_tokens=False) == text
    assert num_bytes > 100


def test_sentencepiece_without_prefix_space(sentencepiece_metadata):
    ours = build_gguf_tokenizer(sentencepiece_metadata | {"tokenizer.ggml.add_space_prefix": False})
    ids = ours.encode("the harbour").ids
    assert ours.id_to_token(ids[0]) == "the" or not ours.id_to_token(ids[0]).startswith("▁")
    assert ours.decode(ids) == "the harbour"
    assert ours.decode(ours.encode(" the").ids) == " the"


def test_special_and_user_tokens_stay_whole(byte_level_metadata):
    metadata = byte_level_metadata("gpt-2")
    types = list(metadata["tokenizer.ggml.token_type"])
    tokens = [*metadata["tokenizer.ggml.tokens"], "<｜begin▁of▁sentence｜>", "<think>", "[PAD7]"]
    types += [3, 4, 5]
    ours = build_gguf_tokenizer(metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    first = len(tokens) - 3
    ids = ours.encode("<｜begin▁of▁sentence｜>the<think>the[PAD7]").ids
    assert ids[0] == first
    assert first + 1 in ids
    assert first + 2 not in ids
    assert ours.decode(ids) == "the<think>the[PAD7]"
    assert ours.get_vocab_size() == len(tokens)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, ["'bert'", "gpt2, llama"]),
        ({"tokenizer.ggml.model": ...}, ["None", "gpt2, llama"]),
        ({"tokenizer.ggml.pre": "klingon"}, ["'klingon'", "qwen2", "smollm"]),
        ({"tokenizer.ggml.tokens": ...}, ["tokenizer.ggml.tokens"]),
        ({"tokenizer.ggml.tokens": []}, ["tokenizer.ggml.tokens"]),
        ({"tokenizer.ggml.tokens": [1, 2]}, ["tokenizer.ggml.tokens"]),
        ({"tokenizer.ggml.merges": ...}, ["merges"]),
        ({"tokenizer.ggml.merges": ["abc"]}, ["'abc'"]),
        ({"tokenizer.ggml.merges": ["a b c"]}, ["'a b c'"]),
        ({"tokenizer.ggml.merges": ["qqqq zzzz"]}, ["inconsistent", "qqqq"]),
        ({"tokenizer.ggml.token_type": [1, 1]}, ["types 2"]),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": ..., "tokenizer.ggml.scores": [0.0]}, ["score"]),
    ],
)
def test_refusals_name_what_is_wrong(byte_level_metadata, changes, words):
    metadata = {key: value for key, value in (byte_level_metadata() | changes).items() if value is not ...}
    with pytest.raises(ConfigError) as caught:
        build_gguf_tokenizer(metadata)
    assert all(word in str(caught.value) for word in words), str(caught.value)
