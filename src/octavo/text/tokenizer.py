"""Text to token ids and back, through the ``tokenizers`` library, for both kinds of checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequestError, ModelLoadError

if TYPE_CHECKING:
    import tokenizers


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the other 68 as characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """A model's tokenizer. Build it with ``from_gguf`` or ``from_directory``."""

    def __init__(self, backend: tokenizers.Tokenizer, bos_token_id: int | None, eos_token_id: int | None) -> None:
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.vocab_size: int = max(backend.get_vocab_size(), 1 + max(backend.get_added_tokens_decoder(), default=-1))
        self.special_token_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._bytes: dict[int, bytes | None] = {}

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build it from a GGUF file's metadata; raises ``ModelLoadError`` if that describes none that is supported."""
        from octavo.text.gguf_tokenizer import build_from_gguf, token_id

        backend = build_from_gguf(metadata)
        size = backend.get_vocab_size()
        return cls(backend, token_id(metadata, "bos", size), token_id(metadata, "eos", size))

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Read tokenizer.json, and tokenizer_config.json for the names of BOS and EOS; raises ``ModelLoadError``."""
        from tokenizers import Tokenizer as Backend

        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelLoadError(f"{path} has no tokenizer.json; convert its tokenizer with transformers' save_pretrained")
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"{file} is not a usable tokenizer: {error}") from error
        config = read_tokenizer_config(path)
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, *(_named_id(backend, config.get(name)) for name in ("bos_token", "eos_token")))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens in the text are recognised.

        ``add_special_tokens`` adds what the model expects around a prompt; a BOS that the text already begins with is
        not doubled. Raises ``InvalidRequestError`` for what is not text.
        """
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            problem = "it holds half a surrogate pair" if isinstance(text, str) else f"not {type(text).__name__}"
            raise InvalidRequestError(f"a prompt must be text that can be written as UTF-8: {problem}") from error
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            del ids[0]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        text: str = self.backend.decode([i for i in token_ids if 0 <= i < self.vocab_size], skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, special tokens included; half characters show as U+FFFD."""
        data = self.token_bytes(token_id)
        return self.decode([token_id], skip_special_tokens=False) if data is None else data.decode("utf-8", "replace")

    @property
    def bos_token(self) -> str | None:
        """The text of the BOS token, for the chat template."""
        return None if self.bos_token_id is None else self.backend.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """The text of the EOS token, for the chat template."""
        return None if self.eos_token_id is None else self.backend.id_to_token(self.eos_token_id)

    @cached_property
    def byte_level(self) -> bool:
        """Whether every token stands for bytes, so that decoding is joining them."""
        decoder = self.backend.decoder
        return decoder is not None and json.loads(decoder.__getstate__()).get("type") == "ByteLevel"

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes a token stands for in a byte-level vocabulary; None in others. Unknown ids give no bytes."""
        if not self.byte_level:
            return None
        if token_id not in self._bytes:
            self._bytes[token_id] = self._spell(self.backend.id_to_token(token_id) if token_id >= 0 else None)
        return self._bytes[token_id]

    def _spell(self, token: str | None) -> bytes:
        """As the library does: a token with any character outside the byte alphabet stands for its own UTF-8."""
        if token is None:
            return b""
        try:
            return bytes(_BYTES[char] for char in token)
        except KeyError:
            return token.encode("utf-8")


_BYTES = _byte_alphabet()


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json of a model directory; empty where there is none."""
    file = path / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _named_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    """The id of a token that the config writes as text or as an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None
