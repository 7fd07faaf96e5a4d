"""Beam search by ``transformers``, and a tiny model on which it is worth searching."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest

from tests.models import tiny


def close_scores(expected: Sequence[float]) -> Any:
    """To compare with: 1e-4, but transformers sums in float32, so 16 roundings of 2**-24 for scores in the hundreds."""
    return pytest.approx(expected, abs=1e-4, rel=16 * 2.0**-24)


class Search(NamedTuple):
    """One beam search."""

    prompt: tuple[int, ...]
    width: int
    length_penalty: float
    early_stopping: Any
    stop_ids: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0


def sharp_model() -> Any:
    """A tiny Llama in float32 whose logits are spread so that beams differ. torch gets one thread, as the work is tiny."""
    import torch

    torch.set_num_threads(1)
    model = tiny.build("plain", seed=3)
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
    return model


@cache
def _model() -> Any:
    return sharp_model()


@cache
def transformers_beams(search: Search) -> tuple[list[tuple[int, ...]], list[float]]:
    """Token ids and scores of all beams of a search on the sharp model, best first."""
    import torch

    out = _model().generate(
        torch.tensor([search.prompt]), attention_mask=torch.ones(1, len(search.prompt), dtype=torch.long),
        num_beams=search.width, num_return_sequences=search.width, length_penalty=search.length_penalty,
        early_stopping=search.early_stopping, eos_token_id=list(search.stop_ids) or None, pad_token_id=0,
        max_new_tokens=search.max_tokens, min_new_tokens=search.min_tokens or None, do_sample=False, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    lengths = (out.beam_indices >= 0).sum(1).tolist()
    rows = out.sequences[:, len(search.prompt) :].tolist()
    return [tuple(row[:length]) for row, length in zip(rows, lengths, strict=True)], out.sequences_scores.tolist()


def likely_tokens(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """Tokens that the sharp model says early after a prompt: as stop tokens, they end beams early."""
    beams, _ = transformers_beams(Search(tuple(prompt), 8, 1.0, False, (), 6))
    said = [token for beam in beams for token in beam[1:]]
    return tuple(sorted(set(said), key=lambda token: (-said.count(token), token))[:count])
