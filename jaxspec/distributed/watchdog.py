"""Host. Notices what does not end: steps begin and end, in order, and one that takes too long is told of once."""

import threading
import time
from collections.abc import Callable


class Watchdog:
    """Calls `bark(step, seconds)` in a thread of its own when the oldest open step is older than it may be."""

    def __init__(self, timeout_s: float | None, bark: Callable[[str, float], None]):
        """timeout_s: None never barks."""
        self._timeout_s, self._bark = timeout_s, bark
        self._open: dict[int, tuple[str, float]] = {}
        self._changing = threading.Lock()
        if timeout_s is not None:
            threading.Thread(target=self._watch, args=(timeout_s,), name="watchdog", daemon=True).start()

    def begin(self, number: int, name: str) -> None:
        """A step is about to run."""
        with self._changing:
            self._open[number] = (f"step {number} ({name})", time.monotonic())

    def end(self, number: int) -> None:
        """This step is done, and so are all before it: a device runs them in order."""
        with self._changing:
            for one in [one for one in self._open if one <= number]:
                del self._open[one]

    @property
    def oldest(self) -> tuple[str, float] | None:
        """The open step that began first, and for how many seconds it has been open."""
        with self._changing:
            step, began = next(iter(self._open.values()), (None, 0.0))
        return None if step is None else (step, time.monotonic() - began)

    def _watch(self, timeout_s: float) -> None:
        while True:
            time.sleep(min(1.0, timeout_s / 4))
            found = self.oldest
            if found is not None and found[1] > timeout_s:
                self._bark(*found)
                return
