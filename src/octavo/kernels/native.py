"""Stage 5 of 7: paged attention and all other ops on the CPU, in C++. Before it: ``blocks.block_table``. After it: ``models``.

What the ops compute is defined in ``reference.py``; layouts of weights and of the KV pool are drawn in ``csrc/kernels.h``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from octavo import _native
from octavo.errors import ConfigError, ModelLoadError
from octavo.kernels.cpus import default_threads
from octavo.kernels.dequantize import num_bytes, packed_formats
from octavo.kernels.memory import Arena
from octavo.kernels.native_program import NativeProgram
from octavo.kernels.native_storage import NativeKVCache, NativeMatrix, NativeWeight
from octavo.kernels.ops import Array, Int32, KVShape, TensorSource
from octavo.kernels.quantize import NOT_FINITE, check_quantisable
from octavo.kernels.shapes import DTYPES, INT32, address

_FORMATS = {name: (i, block_size, block_bytes) for i, (name, block_size, block_bytes) in enumerate(_native.formats())}


class NativeBackend:
    """The C++ kernels with a thread pool of their own.

    threads: default as ``cpus.default_threads``. isa: default the environment's OCTAVO_ISA, else the best this machine runs.
    shared_prefix: whether attention reads keys that requests have in common once for all of them; results are the same bits.
    """

    def __init__(self, threads: int | None = None, isa: str | None = None, shared_prefix: bool = True) -> None:
        try:
            self._kernels = _native.select_kernels(isa or os.environ.get("OCTAVO_ISA", ""))
        except ValueError as error:
            raise ConfigError(f"OCTAVO_ISA: {error}") from None
        self._pool = _native.Pool(threads or default_threads())
        self._arena = Arena()
        self._shared_prefix = shared_prefix

    @property
    def name(self) -> str:
        return f"native ({self.isa}, {self.threads} thread{'s' if self.threads > 1 else ''})"

    @property
    def isa(self) -> str:
        return self._kernels.name

    @property
    def threads(self) -> int:
        return self._pool.num_threads

    def pack(self, sources: Sequence[TensorSource], format: str, biases: Sequence[TensorSource] = ()) -> NativeWeight:
        in_features = sources[0].shape[1]
        if any(source.shape[1] != in_features for source in sources):
            raise ValueError(f"cannot stack matrices of different in_features: {[source.shape for source in sources]}")
        if biases and [b.shape[0] for b in biases] != [s.shape[0] for s in sources]:
            raise ValueError(f"biases {[b.shape for b in biases]} do not match the matrices {[s.shape for s in sources]}")
        bias = np.concatenate([self.vector(b) for b in biases]) if biases else None
        formats = packed_formats([source.format for source in sources], format)
        parts: list[NativeMatrix] = []
        for packed, run in groupby(zip(formats, sources, strict=True), key=itemgetter(0)):
            start = sum(part.out_features for part in parts)
            parts.append(self._pack_part([source for _, source in run], packed, None if bias is None else bias[start:]))
        return NativeWeight(tuple(parts), in_features, "bfloat16" if formats[0] == "BF16" else "float32", bias)

    def _pack_part(self, sources: list[TensorSource], format: str, bias: Array | None) -> NativeMatrix:
        described = [_describe(source) for source in sources]
        number, in_features = _FORMATS[format][0], sources[0].shape[1]
        out_features = sum(source.shape[0] for source in sources)
        data = self._arena.take(_native.matrix_bytes(number, out_features, in_features))
        _native.pack(self._kernels, self._pool, described, address(data), in_features, number)
        matrix = _native.PackedMatrix(address(data), address(bias), out_features, in_features, number)
        return NativeMatrix(matrix, format, out_features, data)

    def quantize(self, source: TensorSource, format: str) -> TensorSource:
        rows, columns = source.shape
        check_quantisable(format, columns)
        out = np.empty(num_bytes(format, rows * columns), np.uint8)
        if not _native.quantize(self._kernels, self._pool, _describe(source), columns, format == "Q8_0", address(out)):
            raise ModelLoadError(f"{source.name} cannot be quantised: {NOT_FINITE}")
        return TensorSource(source.name, source.shape, format, out)

    def vector(self, source: TensorSource) -> Array:
        out = self.empty((int(np.prod(source.shape)),), "float32")
        _native.dequantize(self._kernels, _describe(source), address(out), out.size)
        return out if source.row_order is None else out[source.row_order]

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        size = int(np.prod(shape)) * DTYPES[dtype].itemsize
        raw = np.empty(size + 64, np.uint8)
        start = -address(raw) % 64
        return raw[start : start + size].view(DTYPES[dtype]).reshape(shape)

    def kv_cache(self, shape: KVShape) -> NativeKVCache:
        return NativeKVCache(shape)

    def program(self, sizes: Int32) -> NativeProgram:
        return NativeProgram(self._kernels, self._pool, sizes, self._shared_prefix)


def _describe(source: TensorSource) -> _native.PackSource:
    """A tensor for native code, its bytes checked. A vector is one row."""
    if source.format not in _FORMATS:
        raise ModelLoadError(f"{source.name}: format {source.format} is not supported; supported are {', '.join(_FORMATS)}")
    number, block_size, block_bytes = _FORMATS[source.format]
    num_rows, columns = source.shape if len(source.shape) == 2 else (1, int(np.prod(source.shape)))
    if columns % block_size:
        raise ModelLoadError(f"{source.name}: rows of {columns} are not whole {source.format} blocks of {block_size}")
    row_bytes = columns // block_size * block_bytes
    if source.data.nbytes != num_rows * row_bytes or not source.data.flags.c_contiguous:
        raise ModelLoadError(
            f"{source.name}: {source.shape} in {source.format} take {num_rows * row_bytes} bytes, not {source.data.nbytes}"
        )
    order = source.row_order if len(source.shape) == 2 else None
    if order is not None and (order.dtype != INT32 or order.shape != (num_rows,) or order.min() < 0 or order.max() >= num_rows):
        raise ValueError(f"{source.name}: row_order must be {num_rows} int32 row numbers")
    return _native.PackSource(address(source.data), address(order), num_rows, row_bytes, number)
