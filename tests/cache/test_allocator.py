"""Host. Pages handed out and taken back: none twice, none lost, and an audit that notices either."""

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
    allocator.free([0])
    with pytest.raises(AssertionError, match="not held"):
        allocator.free([0])


@pytest.mark.parametrize(("held", "says"), [([0, 0, 1], "two requests"), ([0], "differ"), ([0, 1, 2], "differ")])
def test_the_audit_notices(held, says):
    allocator = PageAllocator(4)
    assert sorted(allocator.allocate(2)) == [0, 1]
    allocator.audit([1, 0])
    with pytest.raises(AssertionError, match=says):
        allocator.audit(held)


@pytest.mark.parametrize(("free", "used", "says"), [([2], {0, 1}, "lost"), ([1, 2], {0, 1}, "free")])
def test_the_audit_notices_a_broken_account(free, used, says):
    allocator = PageAllocator(4)
    allocator._free, allocator._used = free, used
    with pytest.raises(AssertionError, match=says):
        allocator.audit(used)
