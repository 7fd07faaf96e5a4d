"""Log-probabilities in the two shapes of OpenAI's API, and in that of the ``prompt_logprobs`` extension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.engine.outputs import PositionLogprobs
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer

_LEAST = -9999.0
"""Stands for minus infinity, as in OpenAI's API: JSON has no such number."""


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; where that is no whole characters, ``bytes:\\xe2\\x98`` as OpenAI writes it, so that names differ."""
    data = tokenizer.token_bytes(token_id)
    if data is None:
        return tokenizer.token_text(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """The shape of /v1/completions: columns, with each token's offset in the text of the choice."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._detokenizer = Detokenizer(tokenizer)
        self._offset = 0

    def columns(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]) -> dict[str, list[Any]]:
        """The next tokens and what is known of each; the first of a prompt has no log-probability."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([token_id]))
        return {
            "text_offset": offsets,
            "tokens": [token_name(self._tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": [None if p is None else max(p[t].logprob, _LEAST) for t, p in zip(token_ids, positions, strict=True)],
            "top_logprobs": [None if p is None else self._top(t, p) for t, p in zip(token_ids, positions, strict=True)],
        }

    def _top(self, chosen: int, position: PositionLogprobs) -> dict[str, float]:
        kept = {t: x for t, x in position.items() if x.rank <= self._num_top or t == chosen}
        return {token_name(self._tokenizer, t): max(x.logprob, _LEAST) for t, x in sorted(kept.items(), key=lambda entry: entry[1].rank)}


def chat_logprobs(
    tokenizer: Tokenizer, num_top: int, token_ids: Sequence[int], positions: Sequence[PositionLogprobs]
) -> dict[str, list[Any] | None]:
    """The shape of /v1/chat/completions: an entry per token, with its bytes and the best ``num_top``."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        name = token_name(tokenizer, token_id)
        return {"token": name, "logprob": max(logprob, _LEAST), "bytes": [*(name.encode() if data is None else data)]}

    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        best = sorted((x.rank, t, x.logprob) for t, x in position.items() if x.rank <= num_top)
        content.append(entry(token_id, position[token_id].logprob) | {"top_logprobs": [entry(t, logprob) for _, t, logprob in best]})
    return {"content": content, "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, positions: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """Per prompt token, ``{token id: {logprob, rank, decoded_token}}``; the first is None."""
    return [
        None
        if position is None
        else {
            str(t): {"logprob": max(x.logprob, _LEAST), "rank": x.rank, "decoded_token": token_name(tokenizer, t)}
            for t, x in position.items()
        }
        for position in positions
    ]
