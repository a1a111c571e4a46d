"""Host. Turns ids into text as they come, never showing half a character nor taking anything back.

`tokenizers.decoders.DecodeStream` does not serve: it keeps unfinished bytes for good where the text ends with them,
and it stops with an error on byte tokens that never make a character, which sampling does produce.
"""

import re
from collections.abc import Iterable, Sequence

from jaxspec.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # how decoders show bytes that are no character (yet)
# Ids left of the new ones that are decoded with them, since a decoder joins neighbours and strips the first space of
# a text. NOTE: at least 4, as many as one character has bytes, so that the last complete character lies in it whole.
CONTEXT_TOKENS = 4
MAX_WINDOW_TOKENS = 128  # kept at most while nothing but unfinished bytes arrives
MAX_HALF_CHARACTER = 3  # bytes of UTF-8, and so replacement signs, that a next byte may still complete
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class IncrementalDetokenizer:
    """The text of one request's output, as a continuation of its prompt.

    All pieces joined are what decoding prompt and output together adds to the prompt's text. One exception: where a
    run of sentencepiece byte tokens proves invalid, decoding it whole shows even its good characters as replacement
    signs; here a character stays once it is complete.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        # The ids whose text may still matter, and how much of their text has been given out.
        self._window = self._prompt_end(prompt_ids)
        text = self._decode()
        held = _half_character(text)
        self._shown = text[: len(text) - held]
        if not held:
            self._trim()

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
        new, self._shown = text[len(self._shown) : len(text) - held], text[: len(text) - held]
        if not held:
            self._trim()
        elif len(self._window) > MAX_WINDOW_TOKENS:
            self._window = self._window[-CONTEXT_TOKENS:]
            text = self._decode()
            self._shown = text[: max(0, len(text) - held)]
        return new

    def _trim(self) -> None:
        """Keeps some context of what is complete; byte tokens are none, for a run of them is decoded as a whole."""
        whole = [token_id for token_id in self._window if not self._is_byte(token_id)]
        if self._window and not whole:  # anything does, as long as what follows is not taken for the start of a text
            whole = self._tokenizer.encode("a", add_special_tokens=False)
        self._window = whole[-CONTEXT_TOKENS:]
        self._shown = self._decode()

    def _prompt_end(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last visible ids, back to where the context of the output begins."""
        end: list[int] = []
        num_whole = 0
        for token_id in reversed(prompt_ids):
            if num_whole == CONTEXT_TOKENS:
                break
            if token_id not in self._skipped:
                end.append(token_id)
                num_whole += not self._is_byte(token_id)
        return end[::-1]

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "") is not None

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


def _half_character(text: str) -> int:
    """How many replacement signs at the end may stand for the beginning of one character."""
    count = 0
    while count < MAX_HALF_CHARACTER and text.endswith(REPLACEMENT * (count + 1)):
        count += 1
    return count
