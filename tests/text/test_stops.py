"""Host. Stop strings against a search over the whole text after every single character."""

import itertools

import numpy as np
import pytest

from jaxspec.text.stops import StopStrings


def naive(text, stops):
    """(visible text, hit): grow the text one character at a time; the first stop that stands at its end wins."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            hit = max(found, key=len)
            return text[: end - len(hit)], hit
    return text, None


def naive_visible(text, stops):
    """How much of a text without hit may be shown: all but its longest end with which some stop begins."""
    for start in range(len(text) + 1):
        if any(stop.startswith(text[start:]) for stop in stops):
            return text[:start]
    return text


def feed(scanner, pieces):
    shown, hit = "", None
    for piece in pieces:
        new, hit = scanner.push(piece)
        shown += new
        if hit is not None:
            break
    return shown, hit


def cuts(text):
    """Every way to cut a short text into pieces."""
    for mask in itertools.product((False, True), repeat=max(0, len(text) - 1)):
        pieces, start = [], 0
        for index, cut in enumerate(mask, 1):
            if cut:
                pieces.append(text[start:index])
                start = index
        yield [*pieces, text[start:]]


@pytest.mark.parametrize(
    ("text", "stops", "visible", "hit"),
    [
        ("hello world", [], "hello world", None),
        ("hello world", ["world"], "hello ", "world"),
        ("stop", ["stop"], "", "stop"),
        ("ababac", ["abac"], "ab", "abac"),  # a false start overlaps the hit
        ("aaab", ["aab"], "a", "aab"),
        ("abcdef", ["def", "bc"], "a", "bc"),  # completes first, though listed last
        ("abcdef", ["abcdef", "cd"], "ab", "cd"),  # completes first, though it begins last
        ("hello", ["lo", "hello"], "", "hello"),  # both complete at once: the one that began first
        ("a\n\nb", ["\n\n"], "a", "\n\n"),
        ("né😀é", ["😀"], "né", "😀"),
        ("abab", ["abc"], "abab", None),
        ("xend", ["end", "end"], "x", "end"),
    ],
)
def test_known_answers_for_every_cut(text, stops, visible, hit):
    assert naive(text, stops) == (visible, hit)
    for pieces in cuts(text):
        scanner = StopStrings(stops)
        shown, found = feed(scanner, pieces)
        assert (shown + (scanner.flush() if found is None else ""), found) == (visible, hit), pieces


def random_cases(seed, count):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        alphabet = list("ab") if rng.random() < 0.5 else list("abc\n")
        stops = ["".join(rng.choice(alphabet, int(rng.integers(1, 6)))) for _ in range(int(rng.integers(0, 4)))]
        text = "".join(rng.choice(alphabet, int(rng.integers(0, 40))))
        pieces = []
        while sum(map(len, pieces)) < len(text):
            start = sum(map(len, pieces))
            pieces.append(text[start : start + int(rng.integers(0, 5))])
        yield text, stops, pieces


def test_random_texts_and_cuts():
    hits = 0
    for text, stops, pieces in random_cases(0, 5000):
        expected, expected_hit = naive(text, stops)
        scanner, shown, hit, taken = StopStrings(stops), "", None, ""
        for piece in pieces:
            new, hit = scanner.push(piece)
            shown, taken = shown + new, taken + piece
            if hit is not None:
                break
            assert shown == naive_visible(taken, stops), (text, stops, pieces)
        assert hit == expected_hit, (text, stops, pieces)
        assert shown + scanner.flush() == expected, (text, stops, pieces)
        hits += hit is not None
    assert 1000 < hits < 4500


def test_nothing_is_shown_after_a_hit():
    scanner = StopStrings(["x"])
    assert scanner.push("axb") == ("a", "x")
    assert scanner.push("more") == ("", "x")
    assert scanner.flush() == ""


def test_the_hit_may_be_shown():
    assert StopStrings(["bc"], include_in_output=True).push("abcd") == ("abc", "bc")
    scanner = StopStrings(["bc"], include_in_output=True)
    assert scanner.push("ab") == ("a", None)
    assert scanner.push("cd") == ("bc", "bc")


def test_unarmed_text_cannot_complete_a_stop_but_may_begin_one():
    scanner = StopStrings(["ab"])
    assert scanner.push("ab", armed=False) == ("ab", None)
    assert scanner.push("xa", armed=False) == ("x", None)
    assert scanner.push("b") == ("", "ab")
    scanner = StopStrings(["abab", "b"])
    assert scanner.push("xab", armed=False) == ("x", None)  # "b" is over, "ab" may still begin "abab"
    assert scanner.push("ab") == ("", "abab")
    scanner = StopStrings(["aab", "aa"])
    assert scanner.push("aa", armed=False) == ("", None)
    assert scanner.push("c") == ("aac", None)
    scanner = StopStrings(["ab", "xyz"])
    assert scanner.push("ab", armed=False) == ("ab", None)  # nothing of it can come back
