"""Where the last tokens stood before, against a search through all places."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from octavo.scheduler.ngrams import MAX_TRIED, NgramIndex


def found_by_search(tokens: list[int], shortest: int, longest: int) -> int:
    """Of the latest places where the last ``shortest`` tokens stood before, the one that agrees in the most tokens."""
    last = tokens[len(tokens) - shortest :]
    places = [p for p in range(len(tokens) - shortest) if tokens[p : p + shortest] == last] if len(tokens) >= shortest else []
    found, most = -1, 0
    for place in places[::-1][:MAX_TRIED]:
        end = place + shortest
        common = next((n for n in range(min(end, longest)) if tokens[end - 1 - n] != tokens[-1 - n]), min(end, longest))
        if common > most:
            found, most = end, common
    return found


@given(st.lists(st.integers(0, 2) | st.just(70_000), max_size=80), st.integers(1, 4), st.integers(0, 5), st.data())
def test_the_place_is_the_one_that_a_search_finds(tokens: list[int], shortest: int, more: int, data: st.DataObject) -> None:
    index, known = NgramIndex(shortest, shortest + more), array("i")
    while len(known) < len(tokens):
        known.extend(tokens[len(known) : len(known) + data.draw(st.integers(1, 5))])
        while index.num_missing(known):
            before = index.num_missing(known)
            index.extend(known, data.draw(st.integers(1, 3)))
            assert index.num_missing(known) < before
        assert index.find(known) == found_by_search(known.tolist(), shortest, shortest + more)


def test_the_longest_agreement_is_preferred_and_then_the_latest_place() -> None:
    index = NgramIndex(2, 4)
    tokens = array("i", [9, 1, 2, 50, 7, 1, 2, 60, 8, 1, 2, 70, 7, 1, 2])
    index.extend(tokens, len(tokens))
    assert tokens[index.find(tokens)] == 60  # after 7 1 2, though 1 2 stood again later
    tokens[12] = 6
    assert tokens[index.find(tokens)] == 70


def test_nothing_is_found_in_too_few_tokens_or_without_a_repetition() -> None:
    index = NgramIndex(3, 8)
    for tokens in (array("i"), array("i", [1, 1]), array("i", [1, 1, 1]), array("i", [1, 1, 1, 2])):
        index.extend(tokens, 10)
        assert index.find(tokens) == -1
