"""Grammars that bind an output: JSON schemas, regular expressions, choices, Lark grammars, by the library ``llguidance``."""

from __future__ import annotations

import ctypes
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from octavo.errors import InvalidRequestError
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

_MAX_CACHED = 64
_MAX_SOURCE = 2**18


class GrammarSource(NamedTuple):
    """A grammar as a client writes it."""

    kind: Literal["json", "regex", "lark"]
    text: str
    """A JSON schema as JSON, a regular expression of the whole output, or a Lark grammar whose rule ``start`` is the output."""
    field: str
    """What the client calls it, for errors."""


class Grammar:
    """A compiled grammar. Every output begins with a state of its own."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> GrammarState:
        """The place before the first token."""
        return GrammarState(self._matcher.deep_copy())


class GrammarState:
    """A place in a grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_ids: Sequence[int]) -> None:
        """The output goes on with these tokens."""
        self._matcher.consume_tokens([*token_ids])

    def fill(self, address: int, num_bytes: int) -> None:
        """Write a bit per token of the vocabulary: whether it may come next. None may, if the grammar got too complex."""
        if self._matcher.is_error():
            ctypes.memset(address, 0, num_bytes)
        else:
            self._matcher.unsafe_compute_mask_ptr(address, num_bytes)


class GrammarCompiler:
    """Compiles grammars for one model; may be used from any thread, and keeps the latest.

    ``vocab_size`` is the model's, which may be larger than the tokenizer's; ``eos_token_ids`` end an output where the grammar allows it.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._backend: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], Grammar] = OrderedDict()

    def compile(self, source: GrammarSource) -> Grammar:
        """Compile a grammar; raises InvalidRequestError, naming the field, for one that is wrong or not supported."""
        key = source.kind, source.text
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        if len(source.text) > _MAX_SOURCE:
            raise InvalidRequestError(f"{source.field} has {len(source.text)} characters; at most {_MAX_SOURCE} are taken")
        grammar = self._compile(source)
        with self._lock:
            self._cache[key] = grammar
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        return grammar

    def _compile(self, source: GrammarSource) -> Grammar:
        from llguidance import LLMatcher

        try:
            if source.kind == "json":
                text = LLMatcher.grammar_from_json_schema(source.text, overrides={"whitespace_flexible": False})
            elif source.kind == "regex":
                text = LLMatcher.grammar_from_regex(source.text)
            else:
                text = LLMatcher.grammar_from_lark(source.text)
        except ValueError as error:
            raise _bad(source, str(error)) from error
        matcher = LLMatcher(self._llguidance(), text, log_level=0)
        if matcher.is_error():
            raise _bad(source, matcher.get_error())
        matcher.compute_bitmask()  # finds what is wrong with a grammar before its first token
        if matcher.is_error():
            raise _bad(source, matcher.get_error())
        return Grammar(matcher)

    def _llguidance(self) -> llguidance.LLTokenizer:
        """The library's own view of the vocabulary, made on first use: it takes a good part of a second."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._backend is None:
                if not self._eos:
                    raise InvalidRequestError("this model has no end-of-sequence token, so its output cannot be bound to a grammar")
                self._backend = LLTokenizer(self._tokenizer.backend.to_str(), self._vocab_size, self._eos)
            return self._backend


def _bad(source: GrammarSource, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{source.field} is not usable: {why.strip()[:500]}")


def json_grammar(schema: Any, field: str) -> GrammarSource:
    """JSON that fits a schema, without white space that is not needed."""
    return GrammarSource("json", json.dumps(schema), field)


def choice_grammar(choices: Sequence[str], field: str) -> GrammarSource:
    """One of several texts."""
    return GrammarSource("lark", "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices), field)
