"""Quantised weights: ``linear`` and ``embed`` in every format against the reference, and against themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.kernels.dequantize import FORMATS, is_quantised
from octavo.kernels.ops import Array, Backend, LinearWeight, Size, TensorSource
from octavo.kernels.reference import ReferenceBackend
from tests.helpers.isas import isas, native, needs_native
from tests.helpers.quantised import random_source

pytestmark = needs_native

QUANTISED = [name for name in FORMATS if is_quantised(name)]
every_isa = pytest.mark.parametrize("isa", isas())
every_format = pytest.mark.parametrize("format", QUANTISED)


def inputs(rows: int, columns: int, seed: int = 0) -> Array:
    """Rows of very different sizes, with a few outliers and zeros in them."""
    chance = np.random.default_rng(seed)
    x = chance.standard_normal((rows, columns)) * np.exp(chance.normal(0, 3, (rows, 1)))
    x[chance.random(x.shape) < 0.02] *= 30
    x[chance.random(x.shape) < 0.1] = 0
    return np.asarray(x, np.float32)


def multiply(backend: Backend, x: Array, weight: LinearWeight) -> Array:
    sizes = np.full(len(Size), len(x), np.int32)
    out = np.full((len(x), weight.out_features), np.nan, np.float32)
    program = backend.program(sizes)
    program.linear(x, weight, out)
    program.run()
    return out


def tolerance(x: Array, weight: Any) -> Array:
    """Of a sum of n groups in float32, each term rounded a few times: gamma(n + 5) times the sum of magnitudes (Higham 2002, 3.1)."""
    steps = 2 * x.shape[1] // 16 + 5
    reach = np.abs(x).reshape(len(x), -1, 32).max(-1).repeat(32, -1)  # of an input once rounded
    magnitude = np.zeros((len(x), weight.out_features))
    column = 0
    for part in weight.parts:
        parts = np.abs(part.scales[..., None] * part.codes) + (0 if part.minima is None else np.abs(part.minima[..., None]))
        magnitude[:, column : column + len(parts)] = reach @ parts.reshape(len(parts), -1).T
        column += len(parts)
    return np.asarray(steps * 2.0**-24 * magnitude + 1e-30)


def check(isa: str, threads: int, sources: list[TensorSource], x: Array, bias: Array | None = None) -> None:
    biases = [] if bias is None else [TensorSource("b", bias.shape, "F32", bias.view(np.uint8))]
    packed, reference = native(isa, threads).pack(sources, "quantised", biases), ReferenceBackend().pack(sources, "quantised", biases)
    assert packed.input_dtype == reference.input_dtype == "float32"
    found, expected = multiply(native(isa, threads), x, packed), multiply(ReferenceBackend(), x, reference)
    slack = tolerance(x, reference) + (0 if bias is None else 2.0**-23 * np.abs(bias))
    assert np.all(np.abs(found - expected) <= slack), np.max(np.abs(found - expected) / slack)


@every_isa
@every_format
def test_linear_is_the_reference(isa: str, format: str) -> None:
    block = FORMATS[format][0]
    for rows, out_features, blocks, threads in ((1, 33, 1, 1), (5, 16, 3, 2), (70, 47, 2, 3)):
        bias = inputs(1, out_features, 9)[0] if rows == 5 else None
        check(isa, threads, [random_source(format, out_features, blocks * block, rows)], inputs(rows, blocks * block), bias)
