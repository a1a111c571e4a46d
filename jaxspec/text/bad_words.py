"""Host. Forbidden words as the token sequences that would write them."""

from collections.abc import Sequence

from jaxspec.text.tokenizer import Tokenizer


def bad_word_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each word as it begins a text, and as it follows a space, where that differs."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in (bare or word, f" {bare}"):
            sequences[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return [list(ids) for ids in sequences if ids]
