"""Quantised weights: ``linear`` and ``embed`` in every format against the reference, and against themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.kernels.dequantize import FORMATS, dequantize, is_quantised
from octavo.kernels.ops import Array, Size, TensorSource
from octavo.kernels.reference import ReferenceBackend
from tests.helpers.isas import isas, native, needs_native
from tests.helpers.products import multiply
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


@every_isa
@every_format
def test_error_is_that_of_rounding_the_inputs(isa: str, format: str) -> None:
    """Against exact products of the dequantised weights: each input is off by half a step of its group, amax / 254, at most."""
    columns = 512
    source, x = random_source(format, 40, columns, 11), inputs(12, columns, 12)
    found = multiply(native(isa), x, native(isa).pack([source], "quantised"))
    weights = dequantize(format, source.data, 40 * columns).reshape(40, columns).astype(np.float64)
    steps = np.abs(x).reshape(12, -1, 32).max(-1).repeat(32, -1) / 127
    slack = (0.5 + 2.0**-15) * steps @ np.abs(weights).T + tolerance(x, ReferenceBackend().pack([source], "quantised"))
    assert np.all(np.abs(found - x @ weights.T) <= slack)


@every_isa
def test_formats_may_mix_in_a_stack(isa: str) -> None:
    order = np.random.default_rng(3).permutation(37).astype(np.int32)
    floats = inputs(5, 256, 4)
    sources = [random_source("Q4_K", 37, 256, 1, order), random_source("Q4_K", 20, 256, 2), random_source("Q6_K", 9, 256, 3)]
    sources.append(TensorSource("f", floats.shape, "F32", floats.reshape(-1).view(np.uint8)))
    weight, x = native(isa, 2).pack(sources, "quantised"), inputs(3, 256)
    assert [(part.format, part.out_features) for part in weight.parts] == [("Q4_K", 57), ("Q6_K", 9), ("F32", 5)]
    found = multiply(native(isa, 2), x, weight)
    alone = [multiply(native(isa), x, native(isa).pack([source], "quantised")) for source in sources[:3]]
    alone.append(multiply(native(isa), x, native(isa).pack(sources[3:], "float32")))
    assert np.array_equal(found, np.concatenate(alone, axis=1))


@every_isa
def test_floats_alone_become_bfloat16(isa: str) -> None:
    values = inputs(4, 64)
    weight = native(isa).pack([TensorSource("f", values.shape, "F32", values.reshape(-1).view(np.uint8))], "quantised")
    assert weight.input_dtype == "bfloat16" and [part.format for part in weight.parts] == ["BF16"]


@every_isa
@every_format
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_rows_do_not_depend_on_how_many_there_are(isa: str, format: str, threads: int) -> None:
    columns = FORMATS[format][0] * (1 if FORMATS[format][0] == 256 else 3)
    weight, x = native(isa, threads).pack([random_source(format, 83, columns, 5)], "quantised"), inputs(70, columns)
    alone = np.concatenate([multiply(native(isa), x[i : i + 1], weight) for i in range(70)])
    for n in (2, 3, 5, 16, 33, 63, 64, 65, 70):
        assert np.array_equal(multiply(native(isa, threads), x[:n], weight), alone[:n]), n


@every_isa
def test_many_rows_and_panels(isa: str) -> None:
    weight, x = native(isa, 3).pack([random_source("Q4_1", 2000, 64, 7)], "quantised"), inputs(201, 64)
    found = multiply(native(isa, 3), x, weight)
    for i in (0, 63, 64, 199, 200):
        assert np.array_equal(found[i], multiply(native(isa), x[i : i + 1], weight)[0])


@every_format
def test_instruction_sets_with_fused_products_agree_to_the_bit(format: str) -> None:
    source, x = random_source(format, 40, 256, 8), inputs(9, 256)
    found = [multiply(native(isa), x, native(isa).pack([source], "quantised")) for isa in isas() if isa != "portable"]
    assert all(np.array_equal(result, found[0]) for result in found)


@every_isa
@pytest.mark.parametrize("format", ["Q8_0", "IQ4_NL"])
def test_extreme_codes_do_not_saturate(isa: str, format: str) -> None:
    """The largest products of both signs, at which 16-bit sums overflow."""
    for byte in (0x80, 0x7F, 0x00, 0xFF):
        source = random_source(format, 16, 64, 1)
        source.data.reshape(-1, FORMATS[format][1])[:, 2:] = byte
        for sign in (1, -1):
            check(isa, 1, [source], np.full((1, 64), sign * 1.5, np.float32))


@every_isa
def test_values_that_are_not_finite_stay_in_their_row(isa: str) -> None:
    weight, x = native(isa).pack([random_source("Q5_1", 20, 96)], "quantised"), inputs(6, 96)
    clean = multiply(native(isa), x, weight)
    x[1, 40], x[3, 95], x[4, 0] = np.nan, np.inf, -np.inf
    found = multiply(native(isa), x, weight)
    assert np.all(np.isnan(found[[1, 3, 4]])) and np.array_equal(found[[0, 2, 5]], clean[[0, 2, 5]])


@every_isa
def test_tiny_and_zero_groups_give_the_minima_nothing(isa: str) -> None:
    weight = native(isa).pack([random_source("Q4_1", 20, 96)], "quantised")
    x = np.zeros((3, 96), np.float32)
    x[1] = 2.0**-101
    x[2, :32] = 1e30
    found = multiply(native(isa), x, weight)
    assert np.all(found[:2] == 0) and np.all(np.isfinite(found[2]))


@every_isa
def test_strided_rows_and_untouched_surroundings(isa: str) -> None:
    full = inputs(9, 100)
    weight = native(isa).pack([random_source("Q4_0", 21, 64), random_source("Q8_0", 3, 64)], "quantised")
    wide = np.full((9, 40), -1, np.float32)
    program = native(isa).program(np.array([5, 0, 7, 0], np.int32))
    program.linear(full[:, 7:71], weight, wide[:, 3:27], Size.SAMPLES)
    program.run()
    assert np.array_equal(wide[:7, 3:27], multiply(native(isa), np.ascontiguousarray(full[:, 7:71]), weight)[:7])
    assert np.all(wide[7:] == -1) and np.all(wide[:, :3] == -1) and np.all(wide[:, 27:] == -1)


@every_isa
@every_format
def test_embed_gathers_the_dequantised_rows(isa: str, format: str) -> None:
    source = random_source(format, 50, 512, 3)
    table, ids = native(isa, 2).pack([source], "quantised"), np.array([49, 0, 17, 16, 15, 0], np.int32)
    out = np.full((6, 512), np.nan, np.float32)
    program = native(isa, 2).program(np.full(len(Size), 6, np.int32))
    program.embed(ids, table, out)
    program.run()
    assert np.array_equal(out, dequantize(format, source.data, 50 * 512).reshape(50, 512)[ids])


def test_packed_sizes() -> None:
    """What a weight takes in memory, in bits."""
    bits = {
        "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 8.5, "Q5_1": 9, "Q8_0": 8.5, "Q2_K": 5.125, "Q3_K": 4.5625, "Q4_K": 4.625, "Q5_K": 8.625,
        "Q6_K": 8.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125,
    }  # fmt: skip
    for format in QUANTISED:
        weight = native(isas()[0]).pack([random_source(format, 16, 4096)], "quantised")
        assert weight.nbytes * 8 / (16 * 4096) == bits[format], format
