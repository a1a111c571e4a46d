"""Host. Names of pages: equal exactly when everything that the page's entries depend on is."""

import itertools

import pytest

from jaxspec.cache.prefix import PageNames


def names_of(token_ids, *, block_size=3, lookahead=0, salt=None):
    names = PageNames(block_size, lookahead, salt)
    return names.first(names.num_nameable(len(token_ids)), token_ids)


@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
@pytest.mark.parametrize("block_size", [1, 3])
def test_a_name_says_all_tokens_that_count_and_no_others(block_size, lookahead):
    texts = list(itertools.product((0, 1), repeat=9))
    seen: dict[bytes, tuple] = {}
    counting: dict[tuple, bytes] = {}
    for text in texts:
        for index, name in enumerate(names_of(text, block_size=block_size, lookahead=lookahead)):
            depends_on = index, text[: (index + 1) * block_size + lookahead]
            assert seen.setdefault(name, depends_on) == depends_on
            assert counting.setdefault(depends_on, name) == name
    assert len(seen) > 8


def test_only_full_pages_have_names_and_only_when_what_follows_is_known():
    assert [len(names_of(range(length))) for length in (0, 2, 3, 5, 6)] == [0, 0, 1, 1, 2]
    assert [len(names_of(range(length), lookahead=2)) for length in (0, 2, 4, 5, 7, 8)] == [0, 0, 0, 1, 1, 2]


def test_names_can_be_asked_for_as_the_text_grows():
    names, text = PageNames(3, 1), []
    for token_id in range(20):
        text.append(token_id)
        assert names.first(names.num_nameable(len(text)), text) == names_of(text, lookahead=1)


def test_salts_and_block_boundaries_tell_texts_apart():
    text = [1, 2, 3, 4, 5, 6]
    several = {names_of(text, salt=salt)[-1] for salt in (None, "a", "b", "ab")}
    assert len(several) == 4
    assert names_of([2**31 - 1, 0, 0])[0] != names_of([-1, 0, 0])[0]
