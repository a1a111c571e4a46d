"""Host. Builds a `tokenizers` tokenizer from the vocabulary inside a GGUF file.

transformers can do this too, but only through a private module and after a second of imports; and it knows neither
SmolLM's digit rule nor Qwen's normalisation nor Llama 3's whole-word rule, which this follows.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxspec.errors import ConfigError

# tokenizer.ggml.token_type
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

# How text is split into words before merging, by tokenizer.ggml.pre: the patterns of the models' own tokenizer.json.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_STYLE = ("default", "gpt-2", "gpt2")
DIGIT_STYLE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
LLAMA3_STYLE = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "smaug-bpe")
QWEN2_STYLE = ("qwen2", "deepseek-r1-qwen", "megrez")
TEKKEN_STYLE = ("tekken",)


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the `tokenizer.ggml.*` keys describe; it adds no BOS or EOS of its own.

    Raises:
      ConfigError: a tokenizer kind or splitting rule that is not supported, or keys that contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ConfigError("the GGUF file holds no vocabulary (tokenizer.ggml.tokens); use a file with its tokenizer")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise ConfigError(f"GGUF tokenizer {kind!r} is not supported; supported: {', '.join(builders)}")
    try:
        tokenizer = builders[kind](metadata, tokens)
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"the GGUF file's vocabulary is inconsistent ({error}); fetch the file again") from error

    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ConfigError(f"the GGUF file types {len(types)} of its {len(tokens)} tokens; fetch the file again")
    added = [
        AddedToken(token, normalized=False, special=kind != USER_DEFINED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    style = metadata.get("tokenizer.ggml.pre", "default")
    # Llama 3 and Tekken take a word that is in the vocabulary whole, whatever the merges would make of it.
    whole_words = style in LLAMA3_STYLE + TEKKEN_STYLE
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _stated_merges(metadata)
    if merges is None:
        raise ConfigError("the GGUF file lacks tokenizer.ggml.merges, which a byte-level vocabulary needs")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=whole_words))
    tokenizer.decoder = decoders.ByteLevel()

    split = {
        **dict.fromkeys(LLAMA3_STYLE, _LLAMA3_SPLIT),
        **dict.fromkeys(QWEN2_STYLE, _QWEN2_SPLIT),
        **dict.fromkeys(TEKKEN_STYLE, _TEKKEN_SPLIT),
    }
    if style in split:
        to_words = [pre_tokenizers.Split(Regex(split[style]), behavior="isolated")]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    elif style in GPT2_STYLE + DIGIT_STYLE:
        to_words = [pre_tokenizers.Digits(individual_digits=True)] if style in DIGIT_STYLE else []
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix")))
    else:
        supported = ", ".join(sorted((*GPT2_STYLE, *DIGIT_STYLE, *split)))
        raise ConfigError(f"tokenizer.ggml.pre {style!r} is not supported; supported: {supported}")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*to_words, to_bytes])
    if style in QWEN2_STYLE:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _stated_merges(metadata)
    if merges is None:
        scores = metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(tokens):
            raise ConfigError("the GGUF file must score each token or list merges; fetch the file again")
        merges = _implied_merges(vocabulary, scores)
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    unknown = tokens[unknown_id] if isinstance(unknown_id, int) and 0 <= unknown_id < len(tokens) else None
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    adds_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if adds_space else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return tokenizer


def _stated_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    lines = metadata.get("tokenizer.ggml.merges")
    if lines is None:
        return None
    pairs = [tuple(line.split(" ")) for line in lines]
    if broken := next((line for line, pair in zip(lines, pairs, strict=True) if len(pair) != 2), None):
        raise ConfigError(f"a merge must be two pieces and one space, got {broken!r:.100}; fetch the file again")
    return pairs


def _implied_merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """A sentencepiece vocabulary lists no merges: any two pieces that make a third may merge, best score first."""
    ranked = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append(((-scores[index], -len(left), -len(right), index), (left, right)))
    ranked.sort(key=lambda entry: entry[0])
    return [pair for _, pair in ranked]
