"""What reference programs refer to: matrices as they are multiplied, and the KV pool, in logical order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from octavo.kernels.dequantize import dequantize, is_quantised, split
from octavo.kernels.ops import Array, Int32, KVShape, LinearWeight, TensorSource

DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}
GROUP = 32
"""Inputs of a quantised product that share a scale."""


@dataclass(frozen=True, slots=True, eq=False)
class FloatMatrix:
    """A matrix [out_features, in_features], rounded to its dtype and kept in the dtype of the arithmetic."""

    matrix: Array
    input_dtype: str

    @property
    def out_features(self) -> int:
        return int(self.matrix.shape[0])

    def multiply(self, row: Array) -> Array:
        """``matrix @ row``. row: [in_features]."""
        return np.asarray(np.dot(self.matrix, row.astype(self.matrix.dtype)))


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedMatrix:
    """A matrix of integers with scales: ``scales * codes + minima`` by groups along a row."""

    codes: Array
    """[out_features, groups, group] int32"""
    scales: Array
    """[out_features, groups]"""
    minima: Array | None
    input_dtype = "float32"

    @property
    def out_features(self) -> int:
        return int(self.codes.shape[0])

    @property
    def matrix(self) -> Array:
        weights = self.scales[..., None] * self.codes.astype(self.scales.dtype)
        return np.asarray(weights if self.minima is None else weights + self.minima[..., None]).reshape(len(weights), -1)

    def multiply(self, row: Array) -> Array:
        """``matrix @ row``, with the row rounded to integers as ``ops.Program.linear`` says. row: [in_features]."""
        codes, scales = quantise_row(row)
        codes, scales = codes.reshape(self.codes.shape[1:]), scales.repeat(GROUP // self.codes.shape[2])
        products = np.einsum("ogk,gk->og", self.codes, codes).astype(row.dtype)
        sums = codes.sum(-1).astype(row.dtype)
        out = np.zeros(self.out_features, row.dtype)
        for g in range(len(scales)):
            out += products[:, g] * scales[g] * self.scales[:, g]
            if self.minima is not None:
                out += sums[g] * scales[g] * self.minima[:, g]
        return out


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceWeight:
    """Matrices one below the other, and their bias."""

    parts: tuple[FloatMatrix | QuantisedMatrix, ...]
    bias: Array | None
    nbytes: int

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def in_features(self) -> int:
        return int(self.parts[0].matrix.shape[1])

    @property
    def input_dtype(self) -> str:
        return self.parts[0].input_dtype

    @property
    def matrix(self) -> Array:
        """[out_features, in_features], dequantised."""
        return np.concatenate([part.matrix for part in self.parts])


class ReferenceKVCache:
    """Keys and values as [num_layers, num_blocks, block_size, num_kv_heads, head_dim], in logical order."""

    def __init__(self, shape: KVShape, real: Any = np.float32) -> None:
        self.shape = shape
        full = (shape.num_layers, shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        kept = real if shape.dtype == "int8" else DTYPES[shape.dtype]  # of int8, what it means: a code x scale is exact in float32
        self.keys = np.empty(full, kept)
        self.values = np.empty(full, kept)

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes

    def write(self, layer: int, blocks: Int32, offsets: Int32, keys: Array, values: Array) -> None:
        """Round keys and values [rows, num_kv_heads, head_dim] to the cache's dtype and keep them."""
        rounded = round_to_int8 if self.shape.dtype == "int8" else np.asarray
        self.keys[layer, blocks, offsets] = rounded(keys)
        self.values[layer, blocks, offsets] = rounded(values)

    def read(self, layer: int) -> tuple[Array, Array]:
        return self.keys[layer].copy(), self.values[layer].copy()

    def fill(self, block_ids: Sequence[int], value: float) -> None:
        self.keys[:, list(block_ids)] = value
        self.values[:, list(block_ids)] = value


def round_to_int8(x: Array) -> Array:
    """Each vector along the last axis as codes from -127 to 127 times a scale, ``max |x| / 127`` rounded up to bfloat16.

    A vector of zeros has scale 0; one that is not finite becomes NaN.

    >>> round_to_int8(np.array([[254.0, -1.2, 3.1], [0.0, 0.0, 0.0], [np.inf, 1.0, 2.0]], np.float32)).tolist()
    [[254.0, -2.0, 4.0], [0.0, 0.0, 0.0], [nan, nan, nan]]
    """
    with np.errstate(invalid="ignore"):
        top = np.abs(x).max(-1, keepdims=True).astype(np.float32)
        bits = (top / np.float32(127)).view(np.uint32)
        scale = ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
        scale = np.where(np.isfinite(top), scale, np.float32(np.nan)).astype(x.dtype)
        codes = np.rint(x / np.where(scale == 0, 1, scale).astype(x.dtype)) + 0.0  # integers have no negative zero
        return np.asarray(codes * scale)


def quantise_row(row: Array) -> tuple[Array, Array]:
    """A row [in_features] as integers of magnitude up to 127, int32, and the scale of each group of 32 of them."""
    groups = row.reshape(-1, GROUP)
    greatest = np.abs(groups).max(-1)
    counts = np.isfinite(greatest) & (greatest >= 2.0**-100)
    greatest = np.where(counts, greatest, 1).astype(row.dtype)
    scales = np.where(counts, greatest / row.dtype.type(127), np.where(np.isfinite(groups).all(-1), 0, np.nan)).astype(row.dtype)
    codes = np.rint(np.where(counts[:, None], groups, 0) * (row.dtype.type(127) / greatest)[:, None])
    return codes.astype(np.int32).reshape(-1), scales


def load(source: TensorSource) -> Array:
    """A tensor's values, float32, rows in logical order."""
    values = dequantize(source.format, source.data, int(np.prod(source.shape))).reshape(source.shape)
    return values if source.row_order is None else values[source.row_order]


def read_matrix(source: TensorSource, format: str, real: Any) -> FloatMatrix | QuantisedMatrix:
    """A matrix in a format of ``dequantize.packed_formats``, for arithmetic in ``real``."""
    if is_quantised(format):
        return _read_quantised(source, real)
    dtype = {"F32": "float32", "BF16": "bfloat16"}[format]
    return FloatMatrix(load(source).astype(DTYPES[dtype]).astype(real), dtype)


def _read_quantised(source: TensorSource, real: Any) -> QuantisedMatrix:
    found = split(source.format, source.data, int(np.prod(source.shape)))
    order = slice(None) if source.row_order is None else source.row_order
    rows = source.shape[0]
    codes = found.codes.reshape(rows, -1, found.codes.shape[1])[order].astype(np.int32)
    scales, minima = (None if x is None else x.reshape(rows, -1)[order].astype(real) for x in (found.scales, found.minima))
    assert scales is not None
    return QuantisedMatrix(codes, scales, minima)


def own_weight(weight: LinearWeight) -> ReferenceWeight:
    assert isinstance(weight, ReferenceWeight)
    return weight
