"""Incremental decoding equals decoding all at once, for any ids, and never shows half a character."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import _metadata, _sentencepiece_metadata


@cache
def byte_level() -> Tokenizer:
    return Tokenizer.from_gguf(_metadata())


@cache
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf(_sentencepiece_metadata())


def _pushed(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> list[str]:
    detokenizer, pieces, rest = Detokenizer(tokenizer, skip), [], list(ids)
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.push(rest[:size]))
        rest = rest[size:]
    return [*pieces, detokenizer.finish()]


sizes = st.lists(st.integers(0, 4), max_size=60)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(-2, 262), max_size=60), sizes, st.booleans())
def test_byte_level_random_ids(ids: list[int], sizes: list[int], skip: bool) -> None:
    assert "".join(_pushed(byte_level(), ids, sizes, skip)) == byte_level().decode(ids, skip)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(-1, 275), max_size=40), sizes, st.booleans())
def test_sentencepiece_random_ids(ids: list[int], sizes: list[int], skip: bool) -> None:
    assert "".join(_pushed(sentencepiece(), ids, sizes, skip)) == sentencepiece().decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.sampled_from([byte_level, sentencepiece]))
def test_text_never_shows_half_a_character(text: str, which: object) -> None:
    tokenizer: Tokenizer = which()  # type: ignore[operator]
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = _pushed(tokenizer, ids, [1] * len(ids), True)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces).replace("\ufffd" * text.count("\ufffd"), "") or "\ufffd" in text
    position = 0
    for piece in pieces:
        assert tokenizer.decode(ids)[position : position + len(piece)] == piece
        position += len(piece)


def test_a_character_comes_whole() -> None:
    detokenizer = Detokenizer(byte_level())
    ids = byte_level().encode("é🙂", add_special_tokens=False)
    assert [detokenizer.push([i]) for i in ids] == ["", "é", "", "", "", "🙂"]
    assert detokenizer.push(ids[:1]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens() -> None:
    assert Detokenizer(byte_level()).push([257, 256, 258]) == "ab"
    assert Detokenizer(byte_level(), skip_special_tokens=False).push([257, 256, 258]) == "<s>ab</s>"


def test_window_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a token does not grow with the text: the longest decode is bounded."""
    longest, decode = 0, Tokenizer.decode

    def measured(self: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", measured)
    detokenizer = Detokenizer(sentencepiece())
    for _ in range(300):
        detokenizer.push([260])
    assert longest <= 2
