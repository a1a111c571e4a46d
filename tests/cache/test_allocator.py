"""Host. Pages handed out and taken back: none twice, none lost, those with a name kept while there is room; and an
audit that notices when it is not so."""

import numpy as np
import pytest

from jaxspec.cache.allocator import PageAllocator


def test_every_page_is_held_once_or_free():
    rng = np.random.default_rng(0)
    allocator, held = PageAllocator(20), []
    for _ in range(500):
        if held and rng.random() < 0.5:
            allocator.free(held.pop(rng.integers(len(held))))
        else:
            wanted = int(rng.integers(0, 8))
            is_room = wanted <= 20 - sum(map(len, held))
            assert allocator.can_allocate(wanted) == is_room
            if is_room:
                held.append(allocator.allocate(wanted))
        pages = [page for some in held for page in some]
        assert len(set(pages)) == len(pages)
        assert set(pages) <= set(range(20))
        assert (allocator.num_used, allocator.num_free) == (len(pages), 20 - len(pages))
        allocator.audit(pages)


def test_an_act_that_was_not_asked_for_is_caught():
    allocator = PageAllocator(2)
    allocator.allocate(1)
    assert not allocator.can_allocate(2)
    with pytest.raises(AssertionError, match="exceeds"):
        allocator.allocate(2)
    with pytest.raises(AssertionError, match="not held"):
        allocator.free([1])
    with pytest.raises(AssertionError, match="not held"):
        allocator.name(1, b"a")
    with pytest.raises(AssertionError, match="nothing to share"):
        allocator.hold([1])
    allocator.free([0])
    with pytest.raises(AssertionError, match="not held"):
        allocator.free([0])


def named(num_pages=4, names=(b"a", b"b", b"c")):
    allocator = PageAllocator(num_pages)
    pages = allocator.allocate(len(names))
    for page, name in zip(pages, names, strict=True):
        allocator.name(page, name)
    return allocator, pages


def test_a_page_with_a_name_is_found_while_there_is_room():
    allocator, pages = named()
    assert allocator.find([b"a", b"b", b"x", b"c"]) == pages[:2]
    allocator.hold(pages[:2])
    allocator.audit([*pages, *pages[:2]])
    allocator.free(pages)
    assert (allocator.num_used, allocator.num_cached, allocator.num_free) == (2, 1, 2)
    allocator.free(pages[:2])
    assert (allocator.num_used, allocator.num_cached, allocator.num_free) == (0, 3, 4)
    assert allocator.free_pages == [3]
    assert allocator.find([b"a", b"b", b"c"]) == pages
    # c was left first; then, of those left together, the later page goes before the earlier.
    assert allocator.allocate(2) == [3, pages[2]]
    assert allocator.find([b"a", b"b", b"c"]) == pages[:2]
    assert allocator.allocate(1) == [pages[1]]
    assert allocator.find([b"a", b"b", b"c"]) == pages[:1]


def test_what_is_found_is_not_there_to_be_taken():
    allocator, pages = named()
    allocator.free(pages)
    assert allocator.can_allocate(4)
    assert allocator.can_allocate(2, pages[:2])
    assert not allocator.can_allocate(3, pages[:2])
    allocator.hold(pages[:2])
    assert not allocator.can_allocate(3)
    assert allocator.can_allocate(2, pages[:2])  # held by others already


def test_the_first_page_of_a_name_keeps_it():
    allocator, (a, b) = named(names=(b"a", b"b"))
    (other,) = allocator.allocate(1)
    allocator.name(other, b"a")
    allocator.name(a, b"z")  # what it is of never changes
    assert allocator.find([b"a"]) == [a]
    assert allocator.find([b"z"]) == []
    allocator.audit([a, b, other])
    allocator.free([other])
    assert other in allocator.free_pages


def test_forgetting_frees_what_nobody_holds():
    allocator, pages = named()
    allocator.free(pages[1:])
    allocator.forget()
    allocator.audit(pages[:1])
    assert (allocator.num_cached, allocator.num_free) == (0, 3)
    assert allocator.find([b"a"]) == []


@pytest.mark.parametrize("held", [[0, 0, 1], [0], [0, 1, 2]])
def test_the_audit_notices(held):
    allocator = PageAllocator(4)
    assert sorted(allocator.allocate(2)) == [0, 1]
    allocator.audit([1, 0])
    with pytest.raises(AssertionError, match="differ"):
        allocator.audit(held)


@pytest.mark.parametrize(
    ("free", "holders", "says"),
    [([2], {0: 1, 1: 1}, "lost"), ([1, 2], {0: 1, 1: 1}, "free"), ([2, 3], {0: 2, 1: 1}, "without a name")],
)
def test_the_audit_notices_a_broken_account(free, holders, says):
    allocator = PageAllocator(4)
    allocator._free, allocator._holders = free, holders
    with pytest.raises(AssertionError, match=says):
        allocator.audit(page for page, count in holders.items() for _ in range(count))


def test_the_audit_notices_broken_names():
    for spoil, says in (
        (lambda one: one._name_of.pop(2), "without a name is kept"),
        (lambda one: one._page_of.pop(b"a"), "names differ"),
        (lambda one: one._name_of.update({3: b"x"}), "a free page has a name"),
    ):
        allocator, pages = named()
        allocator.free(pages[2:])
        spoil(allocator)
        with pytest.raises(AssertionError, match=says):
            allocator.audit(pages[:2])
