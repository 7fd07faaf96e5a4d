"""Rows of logits to sample from, and an oracle that sorts in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from octavo.kernels.ops import MAX_TOP, SAMPLE_ROW, Backend, SampleBatch, SampleOutput, Size, uniform

OFF = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "num_logprobs": -1, "target": -1,
    "history_row": -1, "mask_row": -1,
}  # fmt: skip


@dataclass
class Inputs:
    """What a batch's rows refer to."""

    history: Any = field(default_factory=lambda: np.zeros((1, 1), np.int32))
    bias_ids: Any = field(default_factory=lambda: np.zeros(1, np.int32))
    bias_values: Any = field(default_factory=lambda: np.zeros(1, np.float32))
    masks: Any = None


def rows_of(*params: dict[str, Any]) -> Any:
    rows = np.zeros(len(params), SAMPLE_ROW)
    for row, given in zip(rows, params, strict=True):
        for name, value in {**OFF, **given}.items():
            row[name] = value
    return rows


def sample(backend: Backend, logits: Any, rows: Any, inputs: Inputs | None = None) -> SampleOutput:
    """Sample all rows in one step; logits: [rows, vocab] or one row of logits for all."""
    inputs = inputs or Inputs()
    num, vocab = len(rows), logits.shape[-1]
    logits = np.ascontiguousarray(np.broadcast_to(logits, (num, vocab)), np.float32)
    before = logits.copy()
    masks = np.zeros((len(inputs.history), (vocab + 31) // 32), np.uint32) if inputs.masks is None else inputs.masks
    batch = SampleBatch(rows, inputs.history, inputs.bias_ids, inputs.bias_values, masks)
    out = SampleOutput(
        np.full(num, -2, np.int32), np.zeros(num, np.float32), np.zeros(num, np.int32),
        np.full((num, MAX_TOP), -2, np.int32), np.zeros((num, MAX_TOP), np.float32),
    )  # fmt: skip
    sizes = np.zeros(len(Size), np.int32)
    sizes[Size.SAMPLES] = num
    program = backend.program(sizes)
    program.sample(logits, batch, out)
    program.run()
    assert logits.tobytes() == before.tobytes(), "logits must be left as they are"
    return out


@dataclass
class Oracle:
    """The distribution of one row, by sorting in float64: top-k, then top-p in what is left, then min-p."""

    weights: Any
    """[vocab] relative to the best token's; 0 where filtered out"""
    margin: float
    """How far, relative to the total, the cut-off of top-p or min-p is from the next place where it would change the result"""

    @cached_property
    def cumulative(self) -> Any:
        return np.cumsum(self.weights)

    def token(self, u: float) -> int:
        return int(np.searchsorted(self.cumulative, u * self.cumulative[-1], side="right"))

    def agrees(self, token: int, row: Any, error: float) -> bool:
        """Whether ``token`` is drawn for the row's u, or for one within ``error`` of it."""
        u = uniform(int(row["seed"]), int(row["sample_index"]), int(row["position"]))
        return bool(self.weights[token] > 0) and self.token(max(u - error, 0)) <= token <= self.token(min(u + error, 1 - 2.0**-53))


def oracle(adjusted: Any, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, shift: float = 0.0) -> Oracle:
    """``shift`` moves the cut-offs of top-p (relative to the total) and min-p (relative to the best token) by so much."""
    z = adjusted.astype(np.float64)
    order = np.lexsort((np.arange(len(z)), -z))[: np.count_nonzero(z > -np.inf)]
    if top_k > 0:
        order = order[:top_k]
    weights = np.exp((z[order] - z.max()) / np.float64(np.float32(temperature)))
    margin = 1.0
    if top_p < 1:
        mass, goal = np.cumsum(weights), (np.float64(np.float32(top_p)) + shift) * weights.sum()
        margin = float(np.abs(mass[:-1] - goal).min(initial=1.0) / weights.sum())
        weights = weights[: int(np.searchsorted(mass, goal)) + 1]
    if min_p > 0:
        least = np.float64(np.float32(min_p)) * (1 - shift)
        margin = min(margin, float(np.abs(weights / least - 1).min()))
        weights = weights[weights >= least]
    full = np.zeros(len(z))
    full[order[: len(weights)]] = weights
    return Oracle(full, margin)
