"""The tensor formats of GGUF, defined in NumPy.

A quantised tensor is rows of blocks; a block holds 32 or 256 neighbouring weights of a row as small integers
with their scales. Layouts and formulas are those of ggml (``ggml-common.h``, ``ggml-quants.c``); results are
bit-equal to the ``gguf`` package. All numbers are little-endian; ``d`` and ``m`` are float16 scales and offsets.

    Q4_0  d | 16 bytes: low nibbles are weights 0-15, high ones 16-31      w = d * (q - 8)
    Q4_1  d m | the same                                                   w = d * q + m
    Q5_x  as Q4_x, with 4 bytes of fifth bits before the nibbles           w = d * (q - 16)  or  d * q + m
    Q8_0  d | 32 x int8                                                    w = d * q
    Qx_K  256 weights in 16 or 8 groups with scales of 4, 6 or 8 bits      w = d * scale * q [- dmin * min]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Integers = NDArray[np.int16]

FORMATS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
"""Format name -> (weights per block, bytes per block)."""

_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Quantised weights taken apart: ``scales * codes + minima``, by groups of 16 or 32 along a row."""

    codes: Integers
    """[groups, group] int16"""
    scales: Floats
    """[groups]"""
    minima: Floats | None
    """[groups], or none at all"""


def is_quantised(format: str) -> bool:
    """Whether a format holds integers with scales."""
    return format not in _FLOATS


def packed_formats(formats: Sequence[str], packing: str) -> list[str]:
    """What stacked matrices of these formats become when they are packed as "float32", "bfloat16" or "quantised" (``ops.Backend.pack``).

    >>> packed_formats(["Q4_K", "Q6_K", "F16"], "quantised"), packed_formats(["F16"], "quantised"), packed_formats(["Q4_K"], "float32")
    (['Q4_K', 'Q6_K', 'F32'], ['BF16'], ['F32'])
    """
    if packing != "quantised":
        return [{"float32": "F32", "bfloat16": "BF16"}[packing]] * len(formats)
    floats = "F32" if any(map(is_quantised, formats)) else "BF16"
    return [format if is_quantised(format) else floats for format in formats]


def num_bytes(format: str, num_elements: int) -> int:
    """Bytes of ``num_elements`` weights, which must be whole blocks.

    >>> num_bytes("Q4_1", 64)
    40
    """
    block, size = FORMATS[format]
    if num_elements % block:
        raise ValueError(f"{num_elements} weights are not whole {format} blocks of {block}")
    return num_elements // block * size


def dequantize(format: str, data: Bytes, num_elements: int) -> Floats:
    """Return the ``num_elements`` weights that ``data`` (uint8, contiguous) holds, as float32 [num_elements].

    Raises ``ValueError`` for a format that is not in ``FORMATS`` or a length that does not match.
    """
    blocks = _blocks(format, data, num_elements)
    if format in _FLOATS:
        return np.ascontiguousarray(_FLOATS[format](blocks), dtype=np.float32).reshape(num_elements)
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged file may hold infinite scales; that is no warning of ours
        parts = _SPLITTERS[format](blocks)
        weights = parts.scales[:, None] * parts.codes.astype(np.float32)
        return (weights if parts.minima is None else weights + parts.minima[:, None]).reshape(num_elements)


def split(format: str, data: Bytes, num_elements: int) -> Codes:
    """The codes, scales and minima of ``num_elements`` quantised weights; raises as ``dequantize`` does."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _SPLITTERS[format](_blocks(format, data, num_elements))


def _blocks(format: str, data: Bytes, num_elements: int) -> Bytes:
    if format not in FORMATS:
        raise ValueError(f"format {format} is not supported; supported are {', '.join(FORMATS)}")
    if data.size != num_bytes(format, num_elements):
        raise ValueError(f"{num_elements} {format} weights take {num_bytes(format, num_elements)} bytes, not {data.size}")
    return data.reshape(-1, FORMATS[format][1])


def _parts(codes: NDArray[Any], scales: Floats, minima: Floats | None = None) -> Codes:
    """Groups of ``codes`` for the scales, all blocks one after the other."""
    flat = scales.reshape(-1)
    return Codes(codes.reshape(len(flat), -1).astype(np.int16), flat, None if minima is None else minima.reshape(-1))


def _half(column: Bytes) -> Floats:
    """[n, 2] bytes -> [n, 1] float32, read as float16."""
    return np.ascontiguousarray(column).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[..., k] -> [..., 2k]: the low nibbles, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fields(packed: Bytes, width: int, bits: int) -> Bytes:
    """[n, k] -> [n, k/width, 8/bits, width]: of every ``width`` bytes the lowest ``bits``, then the next, ..."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    return (packed.reshape(len(packed), -1, 1, width) >> shifts) & np.uint8((1 << bits) - 1)


def _signed(values: Bytes, offset: int) -> Integers:
    return values.astype(np.int16) - np.int16(offset)


def _f32(b: Bytes) -> Floats:
    return np.ascontiguousarray(b).view("<f4")


def _bf16(b: Bytes) -> Floats:
    return (np.ascontiguousarray(b).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(b: Bytes) -> Codes:
    return _parts(_signed(_nibbles(b[:, 2:]), 8), _half(b[:, :2]))


def _q4_1(b: Bytes) -> Codes:
    return _parts(_nibbles(b[:, 4:]), _half(b[:, :2]), _half(b[:, 2:4]))


def _fifth_bits(column: Bytes) -> Bytes:
    return np.unpackbits(column, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(b: Bytes) -> Codes:
    return _parts(_signed(_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6]), 16), _half(b[:, :2]))


def _q5_1(b: Bytes) -> Codes:
    return _parts(_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8]), _half(b[:, :2]), _half(b[:, 2:4]))


def _q8_0(b: Bytes) -> Codes:
    return _parts(np.ascontiguousarray(b[:, 2:]).view(np.int8), _half(b[:, :2]))


def _q2_k(b: Bytes) -> Codes:
    """scales[16] (low nibble scale, high nibble min) | 2-bit q[64] | d | dmin."""
    scales, q, d, dmin = b[:, :16], b[:, 16:80], _half(b[:, 80:82]), _half(b[:, 82:84])
    return _parts(_fields(q, 32, 2), d * (scales & 15).astype(np.float32), -(dmin * (scales >> 4).astype(np.float32)))


def _q3_k(b: Bytes) -> Codes:
    """third bits[32], inverted | low two bits[64] | 16 six-bit scales[12] | d."""
    high, low, packed, d = b[:, :32], b[:, 32:96], b[:, 96:108], _half(b[:, 108:110])
    scales = _nibbles(packed[:, :8]) | (_fields(packed[:, 8:], 4, 2).reshape(-1, 16) << np.uint8(4))
    third = _fields(high, 32, 1).reshape(-1, 256)
    return _parts(_signed(_fields(low, 32, 2).reshape(-1, 256) | (third << np.uint8(2)), 4), d * _signed(scales, 32).astype(np.float32))


def _scales_and_mins(packed: Bytes) -> tuple[Floats, Floats]:
    """12 bytes -> eight 6-bit scales and eight 6-bit mins, as float32 [n, 8].

    bytes 0-3   EEAAAAAA   scales 0-3 below, top bits of scales 4-7 above
    bytes 4-7   eeaaaaaa   the same for mins
    bytes 8-11  eeeeEEEE   low four bits of mins 4-7 and of scales 4-7
    """
    scale, low, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([scale & 63, (rest & 15) | ((scale >> 2) & 48)], axis=1)
    mins = np.concatenate([low & 63, (rest >> 4) | ((low >> 2) & 48)], axis=1)
    return scales.astype(np.float32), mins.astype(np.float32)


def _affine_k(b: Bytes, codes: Bytes) -> Codes:
    """d | dmin | scales[12] at the front of a block."""
    scales, mins = _scales_and_mins(b[:, 4:16])
    return _parts(codes, _half(b[:, :2]) * scales, -(_half(b[:, 2:4]) * mins))


def _q4_k(b: Bytes) -> Codes:
    return _affine_k(b, _fields(b[:, 16:], 32, 4))


def _q5_k(b: Bytes) -> Codes:
    """... | fifth bits[32] | low nibbles[128]."""
    high = _fields(b[:, 16:48], 32, 1).reshape(-1, 8, 32) << np.uint8(4)
    return _affine_k(b, _fields(b[:, 48:], 32, 4).reshape(-1, 8, 32) | high)


def _q6_k(b: Bytes) -> Codes:
    """low nibbles[128] | top two bits[64] | int8 scales[16] | d."""
    low = _fields(b[:, :128], 64, 4).reshape(-1, 8, 32)
    high = _fields(b[:, 128:192], 32, 2).reshape(-1, 8, 32) << np.uint8(4)
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return _parts(_signed(low | high, 32), _half(b[:, 208:210]) * scales)


def _iq4_nl(b: Bytes) -> Codes:
    return _parts(_IQ4_VALUES[_nibbles(b[:, 2:])], _half(b[:, :2]))


def _iq4_xs(b: Bytes) -> Codes:
    """d | high bits of 8 six-bit scales (uint16) | their low nibbles[4] | nibbles[128] in groups of 16 bytes."""
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    scales = _half(b[:, :2]) * _signed(low | ((high & 3).astype(np.uint8) << 4), 32).astype(np.float32)
    return _parts(_IQ4_VALUES[_nibbles(b[:, 8:].reshape(-1, 8, 16))], scales)


_FLOATS: dict[str, Callable[[Bytes], Floats]] = {"F32": _f32, "F16": _half, "BF16": _bf16}
_SPLITTERS: dict[str, Callable[[Bytes], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
