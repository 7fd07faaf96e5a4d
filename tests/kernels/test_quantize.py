"""Quantisers: the definition against brute force and the ``gguf`` package; native code against the definition, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from octavo.errors import ModelLoadError
from octavo.kernels.dequantize import FORMATS, dequantize, num_bytes
from octavo.kernels.ops import Array, TensorSource
from octavo.kernels.quantize import quantize
from octavo.kernels.reference import ReferenceBackend
from tests.helpers.isas import isas, native, needs_native

every_isa = pytest.mark.parametrize("isa", isas())
both = pytest.mark.parametrize("format", ["Q8_0", "Q4_1"])


def source_of(weights: Array, order: Array | None = None) -> TensorSource:
    return TensorSource("w", weights.shape, "F32", np.ascontiguousarray(weights, np.float32).reshape(-1).view(np.uint8), order)


def restored(format: str, blocks: Array, shape: tuple[int, ...]) -> Array:
    return dequantize(format, blocks, int(np.prod(shape))).reshape(shape)


def squared_error(weights: Array, format: str, blocks: Array) -> Array:
    """Of each group of 32."""
    return ((restored(format, blocks, weights.shape).astype(np.float64) - weights) ** 2).reshape(-1, 32).sum(axis=1)


def min_max_error(weights: Array) -> Array:
    """Squared error of 4-bit codes between a group's minimum and maximum, as llama.cpp's Q4_1 has them."""
    gguf = pytest.importorskip("gguf")
    blocks = gguf.quantize(weights, gguf.GGMLQuantizationType.Q4_1)
    return squared_error(weights, "Q4_1", np.ascontiguousarray(blocks).reshape(-1))


def drawn(kind: str, rows: int = 64, columns: int = 320) -> Array:
    chance = np.random.default_rng(11)
    shape = (rows, columns)
    return (getattr(chance, kind)(size=shape) * 0.03).astype(np.float32) if kind != "t" else chance.standard_t(4, shape).astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "laplace", "uniform", "t"])
def test_the_search_clearly_beats_min_and_max(kind: str) -> None:
    weights = drawn(kind)
    found, plain = squared_error(weights, "Q4_1", quantize("Q4_1", weights)), min_max_error(weights)
    assert np.all(found <= plain * (1 + 1e-4) + 1e-12)
    assert found.sum() < {"uniform": 0.97}.get(kind, 0.82) * plain.sum()


def test_the_search_is_close_to_the_best_there_is() -> None:
    """Against every pair of 200 x 200 end points, for a few groups."""
    weights = drawn("normal", 12, 32)
    found = squared_error(weights, "Q4_1", quantize("Q4_1", weights))
    shares = np.linspace(-0.06, 0.3, 200)
    for group, error in zip(weights.astype(np.float64), found, strict=True):
        low, span = group.min(), np.ptp(group)
        start, stop = np.meshgrid(low + shares * span, low + (1 - shares) * span, indexing="ij")
        step = ((stop - start) / 15)[..., None]
        q = np.clip(np.rint((group - start[..., None]) / step), 0, 15)
        best = ((step * q + start[..., None] - group) ** 2).sum(axis=-1).min()
        assert error < 1.12 * best


def test_q8_0_is_within_half_a_step() -> None:
    weights = drawn("laplace")
    blocks = quantize("Q8_0", weights)
    d = blocks.reshape(-1, 34)[:, :2].copy().view(np.float16).astype(np.float32)
    error = np.abs(restored("Q8_0", blocks, weights.shape) - weights).reshape(-1, 32)
    assert np.all(error <= 0.5 * d * (1 + 2**-10) + 127 * d * 2**-11)


@both
def test_what_the_format_holds_stays_as_it_is(format: str) -> None:
    """Codes that span the whole range give the same weights again."""
    chance = np.random.default_rng(5)
    blocks = np.zeros((50, FORMATS[format][1]), np.uint8)
    halves = chance.uniform(0.001, 0.1, (50, 2 if format == "Q4_1" else 1)).astype(np.float16)
    blocks[:, : 2 * halves.shape[1]] = halves.view(np.uint8)
    codes = chance.integers(0, 256, (50, blocks.shape[1] - 2 * halves.shape[1]), dtype=np.uint8)
    codes[:, :2] = [0xF0, 0x0F] if format == "Q4_1" else [0x7F, 0x81]
    codes[codes == 0x80] = 0 if format == "Q8_0" else 0x80
    blocks[:, 2 * halves.shape[1] :] = codes
    weights = restored(format, blocks.reshape(-1), (50, 32))
    again = restored(format, quantize(format, weights), (50, 32))
    np.testing.assert_allclose(again, weights, rtol=0, atol=float(np.abs(weights).max()) * 2**-11)
    assert np.mean(again == weights) > 0.9


@both
@pytest.mark.parametrize("value", [0.0, -0.0, 0.37, -0.37, 1e-9, 6e4])
def test_constant_groups(format: str, value: float) -> None:
    weights = np.full((2, 64), value, np.float32)
    found = restored(format, quantize(format, weights), weights.shape)
    np.testing.assert_allclose(found, weights, rtol=2**-10, atol=2**-25)


@both
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, -3e38])
def test_numbers_that_no_scale_holds_are_refused(format: str, bad: float) -> None:
    weights = np.ones((3, 64), np.float32)
    weights[2, 40] = bad
    with pytest.raises(ValueError, match="not finite numbers, or too large"):
        quantize(format, weights)
    for backend in [ReferenceBackend(), *(native(isa) for isa in isas())]:
        with pytest.raises(ModelLoadError, match="w cannot be quantised: there are weights that are not finite"):
            backend.quantize(source_of(weights), format)


def test_what_cannot_be_quantised_is_refused() -> None:
    for backend in [ReferenceBackend(), *(native(isa) for isa in isas())]:
        with pytest.raises(ValueError, match="cannot quantise to Q5_0; choose one of Q8_0, Q4_1"):
            backend.quantize(source_of(np.ones((2, 32))), "Q5_0")
        with pytest.raises(ValueError, match="rows of 33 weights are not whole groups of 32"):
            backend.quantize(source_of(np.ones((2, 33))), "Q8_0")


@needs_native
@every_isa
@both
@pytest.mark.parametrize("threads", [1, 3])
def test_native_is_the_definition(isa: str, format: str, threads: int) -> None:
    chance = np.random.default_rng(2)
    weights = (drawn("t", 37, 608) * chance.choice([1e-9, 1e-6, 1e-3, 1, 100], (37, 1))).astype(np.float32)
    weights[5, :64] = 0
    weights[6] = -0.0
    weights[7, ::2] = -weights[7, ::2]
    order = chance.permutation(37).astype(np.int32)
    found = native(isa, threads).quantize(source_of(weights, order), format)
    assert (found.shape, found.format, found.row_order) == ((37, 608), format, None)
    assert found.data.size == num_bytes(format, 37 * 608)
    assert np.array_equal(found.data, quantize(format, weights[order]))


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    arrays.arrays(np.float32, st.tuples(st.integers(1, 18), st.sampled_from([32, 96])), elements=st.floats(-60000, 60000, width=32)),
    st.sampled_from(["Q8_0", "Q4_1"]),
)
def test_native_is_the_definition_on_anything(weights: Array, format: str) -> None:
    for isa in isas():
        assert np.array_equal(native(isa).quantize(source_of(weights), format).data, quantize(format, weights))


@needs_native
@every_isa
@pytest.mark.parametrize("format", ["BF16", "Q4_K", "Q6_K"])
def test_any_format_is_requantised(isa: str, format: str) -> None:
    block, size = FORMATS[format]
    data = np.random.default_rng(3).integers(0, 50, 5 * 512 // block * size, dtype=np.uint8)
    source = TensorSource("w", (5, 512), format, data)
    expected = quantize("Q8_0", dequantize(format, data, 5 * 512).reshape(5, 512))
    assert np.array_equal(native(isa).quantize(source, "Q8_0").data, expected)
    assert np.array_equal(ReferenceBackend().quantize(source, "Q8_0").data, expected)
