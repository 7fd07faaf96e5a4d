"""Token ids to text as they come, never half a character, equal in the end to decoding all at once."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

from octavo.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
_MAX_HELD = 8


class Detokenizer:
    """The text of one output.

    >>> detokenizer = Detokenizer(tokenizer)                                            # doctest: +SKIP
    >>> "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish() == tokenizer.decode(ids)   # doctest: +SKIP
    True
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._stream = _Bytes(tokenizer) if tokenizer.byte_level else _Window(tokenizer)

    def push(self, token_ids: Iterable[int]) -> str:
        """Take new tokens and return the text that is now certain."""
        skipped = self._skipped
        return self._stream.push([i for i in token_ids if i not in skipped])

    def finish(self) -> str:
        """Return the rest: text that was held back for a token that did not come. Ends the stream."""
        return self._stream.finish()


class _Bytes:
    """Byte-level vocabularies: join the tokens' bytes, decode UTF-8 as it completes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: list[int]) -> str:
        return self._decoder.decode(b"".join(self._token_bytes(i) or b"" for i in token_ids))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class _Window:
    """Other vocabularies, where a token's text depends on its neighbours: decode the newest tokens with some context.

        tokens    ... given out | context | new         text given = decode(context + new) - decode(context)

    The text is held back while the newest token is a byte of a character: the library decodes a run of byte tokens as
    one, or as all replacement characters. The context is what was given out last, so the cost per token is constant.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._new: list[int] = []

    def push(self, token_ids: list[int]) -> str:
        token = self._tokenizer.backend.id_to_token
        spelled = [(i, text) for i in token_ids if i >= 0 and (text := token(i)) is not None]
        self._new += [i for i, _ in spelled]
        if not spelled or _BYTE_TOKEN.fullmatch(spelled[-1][1]):
            return ""
        text = self._text()
        if text.endswith(_REPLACEMENT) and len(self._new) < _MAX_HELD:
            return ""
        self._context, self._new = self._new, []
        return text

    def finish(self) -> str:
        text = self._text() if self._new else ""
        self._context, self._new = self._new, []
        return text

    def _text(self) -> str:
        decode = self._tokenizer.decode
        before = decode(self._context, skip_special_tokens=False)
        return decode(self._context + self._new, skip_special_tokens=False)[len(before) :]
