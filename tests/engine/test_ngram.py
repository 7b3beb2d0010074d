"""Drafts by prompt lookup, against a search without bytes."""

import time
from array import array

from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.ngram import propose


def plain(tokens: list[int], count: int, longest: int, shortest: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        end = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == end:
                grown = tokens.copy()
                for ahead in range(count):
                    grown.append(grown[start + length + ahead])
                return grown[len(tokens) :]
    return []


# Ids whose bytes repeat each other across the borders of tokens.
TOKENS = st.lists(st.sampled_from([0, 1, 256, 257, 65536, 0x01010101, 2**24]), max_size=40)


@given(TOKENS, st.integers(1, 6), st.integers(1, 4), st.integers(0, 3))
def test_same_drafts_as_a_plain_search(tokens: list[int], count: int, shortest: int, more: int) -> None:
    drafts = propose(array("i", tokens), count, longest=shortest + more, shortest=shortest)
    assert drafts == plain(tokens, count, min(shortest + more, max(len(tokens) - 1, 0)), shortest)


def test_the_longest_end_decides_and_of_its_places_the_last() -> None:
    tokens = array("i", [1, 2, 3, 10, 2, 3, 11, 1, 2, 3, 12, 3, 13, 1, 2, 3])
    assert propose(tokens, 2, longest=3, shortest=1) == [12, 3]
    assert propose(tokens, 2, longest=1, shortest=1) == [13, 1]


def test_a_repetition_is_continued() -> None:
    assert propose(array("i", [5, 8, 9, 8, 9]), 5, longest=2, shortest=2) == [8, 9, 8, 9, 8]
    assert propose(array("i", [4, 4]), 3, longest=1, shortest=1) == [4, 4, 4]


def test_nothing_is_proposed_without_a_precedent() -> None:
    assert propose(array("i", [1, 2, 3, 4]), 3, longest=3, shortest=1) == []
    assert propose(array("i"), 3, longest=3, shortest=1) == []
    assert propose(array("i", [7]), 3, longest=3, shortest=1) == []
    assert propose(array("i", [7, 7]), 0, longest=3, shortest=1) == []


def test_a_long_history_without_a_precedent_costs_less_than_a_step() -> None:
    tokens = array("i", range(32_000))
    best = min(_seconds(tokens) for _ in range(5))
    assert best < 0.01


def _seconds(tokens: "array[int]") -> float:
    start = time.perf_counter()
    propose(tokens, 4, longest=4, shortest=2)
    return time.perf_counter() - start
