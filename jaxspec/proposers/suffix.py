"""Host. Guesses copied from what most often followed a row's last tokens, in the row itself and in past answers."""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# The newest places of a token are looked at, and of a suffix counted, where there are more: it bounds a guess's time.
_MOST_PLACES, _MOST_COUNTED = 2**15, 2**12


class Guess(NamedTuple):
    """Tokens that may follow, and how many of them the counts expect to be right."""

    token_ids: list[int]
    score: float


NOTHING = Guess([], 0.0)


class TokenBuffer:
    """Token ids that grow at the end; -1 separates texts."""

    def __init__(self) -> None:
        self._room = np.empty(256, np.int32)
        self.size = 0

    @property
    def token_ids(self) -> np.ndarray:
        """i32[size], a view."""
        return self._room[: self.size]

    def extend(self, token_ids: Sequence[int]) -> None:
        size = self.size + len(token_ids)
        if size > len(self._room):
            room = np.empty(max(size, 2 * len(self._room)), np.int32)
            room[: self.size] = self.token_ids
            self._room = room
        self._room[self.size : size] = token_ids
        self.size = size


class PastAnswers:
    """The answers of the last `capacity` requests, indexed by token: what a global suffix tree would hold.

    A node of such a tree is the set of places where its string ends. The sets are made when they are asked for, from
    the places of the last token, so that an answer costs its tokens to remember and not their suffixes.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._answers: deque[int] = deque()  # where each begins in the buffer
        self._buffer = TokenBuffer()
        self._places: dict[int, array] = {}  # token -> positions after it, ascending

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def token_ids(self) -> np.ndarray:
        return self._buffer.token_ids

    def add(self, token_ids: Sequence[int]) -> None:
        """Remember an answer; the oldest leaves when there are too many."""
        if not token_ids or not self._capacity:
            return
        self._answers.append(self._buffer.size)
        self._buffer.extend([*token_ids, -1])
        self._index(self._answers[-1])
        if len(self._answers) > self._capacity:
            self._answers.popleft()
            if 2 * self._answers[0] > self._buffer.size:
                self._compact()

    def ends(self, token_id: int) -> np.ndarray:
        """Positions that a token's occurrences end before."""
        places = self._places.get(token_id)
        if places is None:
            return np.empty(0, np.int32)
        # A copy: what an array lends cannot grow meanwhile.
        found = np.frombuffer(places, np.int32)[-_MOST_PLACES:].copy()
        return found[np.searchsorted(found, self._answers[0], side="right") :]

    def _index(self, start: int) -> None:
        for place, token_id in enumerate(self._buffer.token_ids[start:].tolist(), start + 1):
            if token_id >= 0:
                self._places.setdefault(token_id, array("i")).append(place)

    def _compact(self) -> None:
        """Forget what has left: amortised, an answer is copied once."""
        start = self._answers[0]
        kept = self._buffer.token_ids[start:].copy()
        self._answers = deque(begin - start for begin in self._answers)
        self._buffer, self._places = TokenBuffer(), {}
        self._buffer.extend(kept)  # pyright: ignore[reportArgumentType]
        self._index(0)


def best_guess(
    token_ids: np.ndarray,
    ends: np.ndarray,
    pattern: np.ndarray,
    *,
    num_tokens: int,
    max_spec_factor: float,
    min_token_prob: float,
) -> Guess:
    """What most often followed the pattern, for the suffix of it that promises the most tokens.

    For each suffix of the pattern that occurs, its likeliest continuation is followed: at most max_spec_factor tokens
    for each token of the suffix, and only as far as the counts put the chance of getting there at min_token_prob. A
    place where the suffix stands counts as one where something else may follow, since the row is about to make one.
    Of equal counts the newest follower is taken, of equal promises the longest suffix.

    Args:
        token_ids: i32[n], -1 between texts.
        ends: positions e, ascending, with token_ids[e - 1] == pattern[-1].
    """
    best = NOTHING
    for length, places in reversed(_suffixes(token_ids, ends, pattern)):
        limit = min(num_tokens, int(max_spec_factor * length))
        if limit <= best.score:  # a token promises one at most
            continue
        guess = _follow(token_ids, places, limit, min_token_prob)
        if guess.score > best.score:
            best = guess
    return best


def _suffixes(token_ids: np.ndarray, ends: np.ndarray, pattern: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(length, places where it ends) of each suffix of the pattern that occurs; of those with the same places the
    longest alone, since it promises as much and may be followed further."""
    found = []
    length = 1
    while len(ends):
        further = ends[:0]
        if length < len(pattern):
            further = ends[np.searchsorted(ends, length, side="right") :]
            further = further[token_ids[further - 1 - length] == pattern[-1 - length]]
        if len(further) < len(ends):
            found.append((length, ends))
        ends, length = further, length + 1
    return found


def _follow(token_ids: np.ndarray, places: np.ndarray, limit: int, min_token_prob: float) -> Guess:
    guessed: list[int] = []
    places = places[-_MOST_COUNTED:]
    score, total = 0.0, len(places) + 1
    while len(guessed) < limit:
        places = places[places < len(token_ids)]
        followers = token_ids[places]
        places = places[followers >= 0]
        if not len(places):
            break
        followers = token_ids[places]
        token_id = _most_frequent(followers)
        places = places[followers == token_id] + 1
        prob = len(places) / total
        if prob < min_token_prob:
            break
        guessed.append(token_id)
        score += prob
    return Guess(guessed, score)


def _most_frequent(followers: np.ndarray) -> int:
    """The newest of the most frequent; followers stand in the order of their age."""
    newest = followers[-1]
    if len(followers) == 1 or (followers == newest).all():
        return int(newest)
    ids, counts = np.unique(followers, return_counts=True)
    most = ids[counts == counts.max()]
    return int(most[0] if len(most) == 1 else followers[np.isin(followers, most)][-1])


class SuffixProposer:
    """Suffix decoding as a `HostProposer`."""

    def __init__(
        self,
        num_tokens: int,
        *,
        max_model_len: int,
        max_tree_depth: int,
        max_cached_requests: int,
        max_spec_factor: float,
        min_token_prob: float,
    ):
        """Remember nothing yet.

        Args:
            num_tokens: K.
            max_model_len: nothing is guessed beyond.
            max_tree_depth: longest suffix looked up.
            max_cached_requests: answers remembered, the oldest leave first.
            max_spec_factor, min_token_prob: as `best_guess` has them.
        """
        self.num_tokens = num_tokens
        self.past = PastAnswers(max_cached_requests)
        self._max_model_len = max_model_len
        self._depth = max_tree_depth
        self._limits = {"max_spec_factor": max_spec_factor, "min_token_prob": min_token_prob}
        self._texts: dict[str, tuple[TokenBuffer, int]] = {}  # request -> (prompt and output, length of the prompt)

    def observe(self, request_id: str, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        if request_id not in self._texts:
            self._texts[request_id] = TokenBuffer(), len(prompt_token_ids)
            self._texts[request_id][0].extend(prompt_token_ids)
        text, num_prompt = self._texts[request_id]
        text.extend(output_token_ids[text.size - num_prompt :])

    def propose(self, request_ids: Sequence[str]) -> list[list[int]]:
        return [self._guess(self._texts[request_id][0].token_ids) for request_id in request_ids]

    def finish(self, request_id: str) -> None:
        text, num_prompt = self._texts.pop(request_id, (None, 0))
        if text is not None:
            self.past.add(text.token_ids[num_prompt:].tolist())

    def _guess(self, token_ids: np.ndarray) -> list[int]:
        """The better of what the row itself and past answers say."""
        room = min(self.num_tokens, self._max_model_len - len(token_ids) - 1)
        if room <= 0:
            return []
        pattern = token_ids[-self._depth :]
        here = np.flatnonzero(token_ids[:-1] == pattern[-1]) + 1
        best = best_guess(token_ids, here, pattern, num_tokens=room, **self._limits)
        if len(self.past):
            before = self.past.ends(int(pattern[-1]))
            there = best_guess(self.past.token_ids, before, pattern, num_tokens=room, **self._limits)
            best = there if there.score > best.score else best
        return best.token_ids
