"""Packing: every format, through every instruction set, bit-equal to the NumPy definition and laid out as drawn in csrc/packed.h."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from octavo.errors import ModelLoadError
from octavo.kernels.dequantize import FORMATS, dequantize
from octavo.kernels.native_storage import NativeWeight
from octavo.kernels.ops import Array, TensorSource
from octavo.kernels.shapes import DTYPES
from tests.helpers.isas import isas, native, needs_native

pytestmark = needs_native

every_isa = pytest.mark.parametrize("isa", isas())


def random_source(format: str, rows: int, columns: int, seed: int = 0, row_order: Array | None = None) -> TensorSource:
    block, size = FORMATS[format]
    data = np.random.default_rng(seed).integers(0, 256, rows * columns // block * size, dtype=np.uint8)
    return TensorSource(f"random.{format}", (rows, columns), format, data, row_order)


def definition(source: TensorSource) -> Array:
    with np.errstate(all="ignore"):
        values = dequantize(source.format, source.data, int(np.prod(source.shape))).reshape(source.shape)
    return values if source.row_order is None else values[source.row_order]


def unpack(weight: NativeWeight) -> Array:
    """The packed floats in logical order, with the padding: [ceil(out/16) * 16, in or in + 1]."""
    [part], columns = weight.parts, weight.in_features
    if part.format == "F32":
        return np.asarray(part.data.view(np.float32).reshape(-1, columns, 16).transpose(0, 2, 1).reshape(-1, columns))
    pairs = part.data.view(ml_dtypes.bfloat16).reshape(-1, (columns + 1) // 2, 16, 2)
    return np.asarray(pairs.transpose(0, 2, 1, 3).reshape(-1, (columns + 1) // 2 * 2))


def same_numbers(found: Array, expected: Array) -> bool:
    """Equal bits, where NaN is NaN whatever its payload."""
    nan = np.isnan(expected)
    bits = np.uint16 if found.dtype == ml_dtypes.bfloat16 else np.uint32
    return np.array_equal(np.isnan(found), nan) and np.array_equal(found[~nan].view(bits), expected[~nan].view(bits))


@every_isa
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format(isa: str, format: str, dtype: str) -> None:
    source = random_source(format, 19, 3 * FORMATS[format][0] if FORMATS[format][0] > 1 else 259)
    weight = native(isa, 2).pack([source], dtype)
    with np.errstate(all="ignore"):
        expected = definition(source).astype(DTYPES[dtype])
    found = unpack(weight)
    assert same_numbers(found[:19, : source.shape[1]], expected)
    assert np.all(found[19:] == 0) and np.all(found[:, source.shape[1] :] == 0)


@every_isa
def test_all_halves(isa: str) -> None:
    data = np.arange(65536, dtype=np.uint16).view(np.uint8)
    found = native(isa).vector(TensorSource("halves", (65536,), "F16", data))
    assert same_numbers(found, data.view(np.float16).astype(np.float32))


@every_isa
def test_rounding_to_bfloat16_is_to_nearest_even(isa: str) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 4096, dtype=np.uint32)
    bits[:2048] = (bits[:2048] & 0xFFFF0000) | np.random.default_rng(2).choice([0x7FFF, 0x8000, 0x8001, 0, 0xFFFF], 2048).astype(np.uint32)
    weight = native(isa).pack([TensorSource("bits", (16, 256), "F32", bits.view(np.uint8))], "bfloat16")
    with np.errstate(all="ignore"):
        assert same_numbers(unpack(weight), bits.view(np.float32).reshape(16, 256).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_stacked_reordered_and_biased(threads: int) -> None:
    order = np.random.default_rng(3).permutation(37).astype(np.int32)
    sources = [random_source("Q8_0", 37, 64, 4, order), random_source("F16", 2, 64, 5), random_source("Q4_1", 30, 64, 6)]
    biases = [random_source("F32", 1, s.shape[0], 7) for s in sources]
    biases = [TensorSource(b.name, (b.shape[1],), b.format, b.data) for b in biases]
    weight = native(isas()[0], threads).pack(sources, "float32", biases)
    assert same_numbers(unpack(weight)[:69], np.concatenate([definition(s) for s in sources]))
    assert weight.bias is not None and same_numbers(weight.bias, np.concatenate([definition(b) for b in biases]))
    assert (weight.out_features, weight.in_features, weight.nbytes) == (69, 64, 80 * 64 * 4 + 69 * 4)


def test_weights_are_aligned_and_apart() -> None:
    packed = [native(isas()[0]).pack([random_source("F32", 3, 5, seed)], "float32") for seed in range(20)]
    for seed, weight in enumerate(packed):
        assert weight.parts[0].data.ctypes.data % 64 == 0
        assert same_numbers(unpack(weight)[:3], definition(random_source("F32", 3, 5, seed)))


def test_damaged_sources_are_refused() -> None:
    backend = native(isas()[0])
    good = random_source("Q4_0", 4, 32)
    with pytest.raises(ModelLoadError, match=r"IQ1_S is not supported; supported are F32"):
        backend.pack([TensorSource("w", (4, 32), "IQ1_S", good.data)], "float32")
    with pytest.raises(ModelLoadError, match="take 72 bytes, not 71"):
        backend.pack([TensorSource("w", (4, 32), "Q4_0", good.data[:71])], "float32")
    with pytest.raises(ModelLoadError, match="not whole Q4_0 blocks of 32"):
        backend.pack([TensorSource("w", (4, 33), "Q4_0", good.data)], "float32")
    with pytest.raises(ValueError, match="row_order"):
        backend.pack([TensorSource("w", (4, 32), "Q4_0", good.data, np.array([0, 1, 2, 4], np.int32))], "float32")
    with pytest.raises(ValueError, match="different in_features"):
        backend.pack([good, random_source("Q4_0", 4, 64)], "float32")
    with pytest.raises(ValueError, match="do not match the matrices"):
        backend.pack([good], "float32", [TensorSource("b", (3,), "F32", np.zeros(12, np.uint8))])
