"""What native programs refer to: packed weights and the KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo import _native
from octavo.kernels.memory import Bytes, map_memory
from octavo.kernels.ops import Array, KVCache, KVShape, LinearWeight
from octavo.kernels.shapes import DTYPES, FLOAT32, address


@dataclass(frozen=True, slots=True, eq=False)
class NativeMatrix:
    """One packed matrix."""

    matrix: _native.PackedMatrix
    format: str
    out_features: int
    data: Bytes


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeight:
    """Matrices in the packed layout of csrc/packed.h, one below the other; each of its own element format."""

    parts: tuple[NativeMatrix, ...]
    in_features: int
    input_dtype: str
    bias: Array | None

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)


class NativeKVCache:
    """The KV pool in the block layout of csrc/kv_layout.h."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.nbytes = shape.nbytes
        self._data = map_memory(self.nbytes)
        self.layout = _native.KVLayout(
            address(self._data), shape.num_layers, shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim,
            shape.dtype,
        )  # fmt: skip

    def read(self, layer: int) -> tuple[Array, Array]:
        s = self.shape
        full = (s.num_blocks, s.block_size, s.num_kv_heads, s.head_dim)
        dtype = FLOAT32 if s.dtype == "int8" else DTYPES[s.dtype]
        keys, values = np.empty(full, dtype), np.empty(full, dtype)
        self.layout.read(layer, address(keys), address(values))
        return keys, values

    def fill(self, block_ids: Sequence[int], value: float) -> None:
        for block in block_ids:
            if not 0 <= block < self.shape.num_blocks:
                raise ValueError(f"block {block} is not one of the cache's {self.shape.num_blocks}")
            self.layout.fill(block, value)


def own_weight(weight: LinearWeight) -> NativeWeight:
    if not isinstance(weight, NativeWeight):
        raise TypeError(f"{type(weight).__name__} belongs to another backend; pack the weight with this one")
    return weight


def own_cache(cache: KVCache, layer: int) -> NativeKVCache:
    if not isinstance(cache, NativeKVCache):
        raise TypeError(f"{type(cache).__name__} belongs to another backend; make the cache with this one")
    if not 0 <= layer < cache.shape.num_layers:
        raise ValueError(f"layer {layer} is not one of the cache's {cache.shape.num_layers}")
    return cache
