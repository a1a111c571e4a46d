"""Host. Turns ids into text as they come, never showing half a character nor taking anything back.

`tokenizers.decoders.DecodeStream` does not serve: it keeps unfinished bytes for good where the text ends with them,
and it stops with an error on byte tokens that never make a character, which sampling does produce.
"""

import re
from collections.abc import Iterable, Sequence

from jaxspec.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # how decoders show bytes that are no character (yet)
CONTEXT_TOKENS = 4  # left of the new ones, since a decoder joins neighbours and strips the first space of a text
MAX_HALF_CHARACTER = 3  # bytes of UTF-8, and so replacement signs, that a next byte may still complete
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class IncrementalDetokenizer:
    """The text of one request's output, as a continuation of its prompt.

    All pieces joined are what decoding prompt and output together adds to the prompt's text. One exception: a
    sentencepiece decoder shows a run of byte tokens as replacement signs altogether once the run proves invalid;
    what was already shown of that run stays.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        # The ids whose text may still matter, and how much of their text has been given out.
        self._window = [token_id for token_id in prompt_ids[-64:] if token_id not in self._skipped]
        self._window = self._window[self._context_start() :]
        text = self._decode()
        self._shown = text[: len(text) - _half_character(text)]

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text that is now certain."""
        return "".join(map(self._push_one, ids))

    def flush(self) -> str:
        """The rest, once no more ids will come: unfinished bytes appear as replacement signs."""
        text = self._decode()
        rest, self._shown = text[len(self._shown) :], text
        return rest

    def _push_one(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode()
        held = _half_character(text)
        certain = text[: len(text) - held]
        # Mid-run a sentencepiece decoder may turn valid bytes back into replacement signs until the character is whole.
        if held and not certain.startswith(self._shown):
            return ""
        new, self._shown = certain[len(self._shown) :], certain
        if not held and (start := self._context_start()):
            self._window = self._window[start:]
            self._shown = self._decode()
        return new

    def _context_start(self) -> int:
        """Where the window may be cut: some tokens from its end, but not inside a run of byte tokens."""
        start = max(0, len(self._window) - CONTEXT_TOKENS)
        while start and _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(self._window[start]) or ""):
            start -= 1
        return start

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


def _half_character(text: str) -> int:
    """How many replacement signs at the end may stand for the beginning of one character."""
    count = 0
    while count < MAX_HALF_CHARACTER and text.endswith(REPLACEMENT * (count + 1)):
        count += 1
    return count
