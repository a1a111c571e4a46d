"""Host. Who holds which page, and what its entries are of: ask, then act; and an audit that no page is lost."""

from collections import Counter
from collections.abc import Iterable, Sequence


class PageAllocator:
    """Hands out page ids [0, num_pages).

    A page is held by one sequence or more, or by none. Of the latter, those with a name (cache/prefix.py) keep their
    entries for whoever asks for that name, until their room is needed: the longest unused goes first.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # neither held nor named; the last freed is the next taken
        self._holders: dict[int, int] = {}
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # named and held by nobody, the longest unused first

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, those that are only remembered among them."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages that someone holds, each counted once."""
        return len(self._holders)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and whose entries are kept."""
        return len(self._idle)

    @property
    def free_pages(self) -> list[int]:
        """Pages whose entries mean nothing."""
        return list(self._free)

    def can_allocate(self, num_pages: int, found: Sequence[int] = ()) -> bool:
        """Whether that many pages could be taken now, besides holding those that were `find`'s."""
        return num_pages <= self.num_free - sum(page in self._idle for page in found)

    def allocate(self, num_pages: int) -> list[int]:
        """Take pages; the caller has asked `can_allocate`."""
        assert self.can_allocate(num_pages), f"{num_pages=} exceeds {self.num_free=}"
        pages = [self._free.pop() if self._free else self._forget_oldest() for _ in range(num_pages)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The pages of these names, up to the first that is not there."""
        pages = []
        for name in names:
            if name not in self._page_of:
                break
            pages.append(self._page_of[name])
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for pages that are held or named."""
        for page in pages:
            assert page in self._holders or page in self._idle, f"page {page} holds nothing to share"
            self._idle.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1

    def find_idle(self, name: bytes) -> int | None:
        """The page of this name, if nobody holds it."""
        page = self._page_of.get(name)
        return page if page in self._idle else None

    def take(self, page: int) -> None:
        """Hold a page that nobody holds as one's own, to write on in it: its name is forgotten."""
        self._forget(page)
        self._holders[page] = 1

    def name(self, page: int, name: bytes) -> None:
        """Say what a held page's entries are of; where another page has the name already, that one keeps it."""
        assert page in self._holders, f"page {page} is named but not held"
        if name not in self._page_of and page not in self._name_of:
            self._page_of[name], self._name_of[page] = page, name

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back, in a sequence's order; each must be held. Later ones are forgotten first: without them
        the earlier are of use, not the other way round."""
        for page in reversed(pages):
            assert page in self._holders, f"page {page} is freed but not held"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._name_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def forget(self) -> None:
        """Forget what any page's entries are of."""
        self._free += self._idle
        self._idle, self._page_of, self._name_of = {}, {}, {}

    def audit(self, held: Iterable[int]) -> None:
        """Check that the pages that sequences hold, each as often as it is shared, are exactly those not free."""
        held = Counter(held)
        assert held == Counter(self._holders), "held pages differ from the allocator's account"
        shared = {page for page, count in held.items() if count > 1}
        assert shared <= self._name_of.keys(), "a page without a name is held twice"
        assert len(self._free) + len(self._idle) + len(self._holders) == self.num_pages, "pages were lost"
        assert len({*self._free, *self._idle, *self._holders}) == self.num_pages, "a held page is also free"
        assert self._idle.keys() <= self._name_of.keys(), "a page without a name is kept"
        assert not self._name_of.keys() & set(self._free), "a free page has a name"
        assert self._page_of == {name: page for page, name in self._name_of.items()}, "names differ"

    def _forget_oldest(self) -> int:
        page = next(iter(self._idle))
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        """What the entries of a page that nobody holds are of."""
        del self._idle[page], self._page_of[self._name_of.pop(page)]
