"""One product, on any backend."""

from __future__ import annotations

import numpy as np

from octavo.kernels.ops import Array, Backend, LinearWeight, Size


def multiply(backend: Backend, x: Array, weight: LinearWeight) -> Array:
    """``linear`` of these rows, with a program of its own."""
    sizes = np.full(len(Size), len(x), np.int32)
    out = np.full((len(x), weight.out_features), np.nan, np.float32)
    program = backend.program(sizes)
    program.linear(x, weight, out)
    program.run()
    return out
