"""Host. Finds stop strings in text that arrives in pieces, and holds back what might become one."""

from collections.abc import Sequence


class StopStrings:
    """A scanner over one request's growing text.

    The string that is complete first wins, however the text is cut into pieces; of several complete at the same
    character the one that began first. Text that could still turn out to be the start of a stop string is withheld.
    """

    def __init__(self, stops: Sequence[str] = (), *, include_in_output: bool = False):
        """Scans for `stops`, none of them empty; a hit's own text is shown only if include_in_output."""
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(dict.fromkeys(stops))
        self._heads = {stop[0] for stop in self._stops}
        self._longest = max(map(len, self._stops), default=0)
        self._include_in_output = include_in_output
        self._pending = ""
        self._hit: str | None = None

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Takes the next piece.

        Args:
          text: what comes next.
          armed: False while stop strings may not end the request yet (min_tokens): one completed now does not count,
            but one begun now and completed later does.

        Returns:
          (text that may be shown now, the stop string that was hit or None). After a hit nothing more is shown.
        """
        if not self._stops or self._hit is not None:
            return ("" if self._hit is not None else text), self._hit
        seen = len(self._pending)
        text = self._pending + text
        if armed and (found := self._first_complete(text, seen)) is not None:
            start, self._hit = found
            self._pending = ""
            return text[: start + len(self._hit) * self._include_in_output], self._hit
        held = self._possible_start(text)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """The withheld text, once no more will come."""
        text, self._pending = self._pending, ""
        return text

    def _first_complete(self, text: str, seen: int) -> tuple[int, str] | None:
        """(start, stop) of the earliest match that ends after the first `seen` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length] in self._heads and any(
                stop.startswith(text[-length:]) for stop in self._stops if len(stop) > length
            ):
                return length
        return 0
