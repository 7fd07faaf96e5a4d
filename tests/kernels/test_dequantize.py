"""Every GGUF format against the ``gguf`` package, bit for bit, on random blocks."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels.dequantize import FORMATS, dequantize, num_bytes

gguf = pytest.importorskip("gguf")


def test_sizes_are_those_of_the_gguf_package() -> None:
    for name, sizes in FORMATS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == sizes


@pytest.mark.parametrize("name", FORMATS)
def test_bit_equal_to_gguf(name: str) -> None:
    block, size = FORMATS[name]
    data = np.random.default_rng(7).integers(0, 256, (257, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        found = dequantize(name, data.reshape(-1), 257 * block)
        expected = gguf.dequantize(data, gguf.GGMLQuantizationType[name]).reshape(-1)
    assert found.dtype == np.float32
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(found), ~numbers)
    assert np.array_equal(found[numbers].view(np.uint32), expected[numbers].view(np.uint32))


def test_wrong_lengths_and_formats_are_refused() -> None:
    data = np.zeros(18, np.uint8)
    with pytest.raises(ValueError, match="take 18 bytes"):
        dequantize("Q4_0", data[:17], 32)
    with pytest.raises(ValueError, match="whole Q4_0 blocks"):
        num_bytes("Q4_0", 33)
    with pytest.raises(ValueError, match="supported are F32"):
        dequantize("IQ1_S", data, 32)
