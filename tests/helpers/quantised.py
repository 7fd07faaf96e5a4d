"""Random quantised tensors with sensible scales."""

from __future__ import annotations

import numpy as np

from octavo.kernels.dequantize import FORMATS
from octavo.kernels.ops import Array, TensorSource

_HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2],
    "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip
"""Where the float16 scales of a block lie."""


def random_source(format: str, rows: int, columns: int, seed: int = 0, row_order: Array | None = None) -> TensorSource:
    """A matrix of random bits, but for float16 scales, which are normally distributed."""
    block, size = FORMATS[format]
    chance = np.random.default_rng(seed)
    data = chance.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    for start in _HALVES[format]:
        data[:, start : start + 2] = (chance.standard_normal((len(data), 1)) * 0.05).astype("<f2").view(np.uint8)
    return TensorSource(f"random.{format}", (rows, columns), format, data.reshape(-1), row_order)
