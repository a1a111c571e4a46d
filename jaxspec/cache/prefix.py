"""Host. Names of pages: a page is named by every token that its entries depend on, so that a name says it all."""

import hashlib
from collections.abc import Sequence

import numpy as np


class PageNames:
    """The names of one sequence's pages, made as its tokens come; committed tokens never change.

    A page's entries depend on all tokens up to its end, and a drafter's also on the `lookahead` tokens behind it (a
    head that pairs a state with the token that follows has 1). The names are digests of these, chained page by page:
    equal names mean equal tokens, and the same salt.
    """

    def __init__(self, block_size: int, lookahead: int, salt: str | None = None):
        self._block_size, self._lookahead = block_size, lookahead
        self._chain = [_digest(b"" if salt is None else b"salt" + salt.encode())]
        self._names: list[bytes] = []
        self._parts: dict[int, bytes] = {}  # names by their ends

    def num_entries(self, num_tokens: int) -> int:
        """How many entries can be named when so many tokens are known."""
        return max(0, num_tokens - self._lookahead)

    def num_nameable(self, num_tokens: int) -> int:
        """How many full pages that makes."""
        return self.num_entries(num_tokens) // self._block_size

    def first(self, num_pages: int, token_ids: Sequence[int]) -> list[bytes]:
        """The names of the first pages, `num_nameable` of them at most."""
        for index in range(len(self._names), num_pages):
            chained, name = self._link(index, (index + 1) * self._block_size, token_ids)
            self._chain.append(chained)
            self._names.append(name)
        return self._names[:num_pages]

    def of_part(self, end: int, token_ids: Sequence[int]) -> bytes:
        """The name of the page that holds token `end - 1`, as far as that; `first` has named the pages before it, and
        `num_entries` is `end` or more."""
        if end not in self._parts:
            self._parts[end] = self._link((end - 1) // self._block_size, end, token_ids)[1]
        return self._parts[end]

    def _link(self, index: int, end: int, token_ids: Sequence[int]) -> tuple[bytes, bytes]:
        """The chain, and the name, of page `index` up to token `end`."""
        chained = _digest(self._chain[index], token_ids[index * self._block_size : end])
        behind = token_ids[end : end + self._lookahead]
        assert len(behind) == self._lookahead, f"{index=} needs more tokens than {len(token_ids)}"
        return chained, _digest(chained, behind) if behind else chained


def _digest(parent: bytes, token_ids: Sequence[int] = ()) -> bytes:
    """256 bits: two texts with one digest are not to be found."""
    return hashlib.blake2b(parent + np.asarray(token_ids, np.int64).tobytes(), digest_size=32).digest()
