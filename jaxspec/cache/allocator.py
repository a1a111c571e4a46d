"""Host. Who holds which page: ask, then act; and an audit that no page is lost or held twice."""

from collections.abc import Iterable


class PageAllocator:
    """Hands out page ids [0, num_pages), the last freed first."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def can_allocate(self, num_pages: int) -> bool:
        """Whether that many pages are free now."""
        return num_pages <= len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Take pages; the caller has asked `can_allocate`."""
        assert self.can_allocate(num_pages), f"{num_pages=} exceeds {self.num_free=}"
        pages = [self._free.pop() for _ in range(num_pages)]
        self._used.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back; each must be held."""
        for page in pages:
            assert page in self._used, f"page {page} is freed but not held"
            self._used.remove(page)
            self._free.append(page)

    def audit(self, held: Iterable[int]) -> None:
        """Check that the pages requests hold, each once, are exactly those not free."""
        held = list(held)
        assert len(held) == len(set(held)), "a page is held by two requests"
        assert set(held) == self._used, "held pages differ from the allocator's account"
        assert len(self._free) + len(self._used) == self.num_pages, "pages were lost"
        assert not self._used & set(self._free), "a held page is also free"
