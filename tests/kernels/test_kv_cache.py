"""Writing, copying, reading and poisoning the native KV pool, in every block layout."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo.kernels.ops import KVShape, Size
from octavo.kernels.reference_storage import round_to_int8
from tests.helpers.isas import isas, native, needs_native

pytestmark = [
    needs_native,
    pytest.mark.parametrize("isa", isas()),
    pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"]),
    pytest.mark.parametrize("block_size", [1, 2, 8, 16, 256]),
]

LAYERS, HEADS, DIM = 3, 2, 24
BITS: dict[str, Any] = {"bfloat16": np.uint16, "float32": np.uint32, "int8": np.uint32}


def new_cache(isa: str, dtype: str, block_size: int, num_blocks: int = 6) -> Any:
    cache = native(isa, 2).kv_cache(KVShape(LAYERS, num_blocks, block_size, HEADS, DIM, dtype))
    cache.fill(range(num_blocks), float("nan"))
    return cache


def tokens(rows: int) -> Any:
    """Keys and values side by side, with everything that is hard to round among them."""
    x = np.random.default_rng(1).standard_normal((rows, 2 * HEADS * DIM)).astype(np.float32)
    hard = [0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1.00390625, 1.01171875, -1e-30, 65504.0]
    x[0, : len(hard)] = x[-1, -len(hard) :] = hard
    if rows > 8:
        x[3] *= np.float32(1e-42)
        x[4, :DIM], x[4, DIM:] = 0.0, 3.4e38
        x[5, 1::2] *= np.float32(1e-3)
    return x


def rounded(x: Any, dtype: str) -> Any:
    """As the cache keeps it; int8 as the float32 that it means."""
    if dtype == "int8":
        return round_to_int8(x.reshape(-1, DIM)).reshape(x.shape)
    return x.astype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)


def write(isa: str, cache: Any, layer: int, x: Any, slots: Any) -> None:
    sizes = np.zeros(len(Size), np.int32)
    sizes[Size.ROWS] = len(slots)
    program = native(isa, 2).program(sizes)
    program.write_kv(x[:, : HEADS * DIM], x[:, HEADS * DIM :], slots, cache, layer)
    program.run()


def same_bits(a: Any, b: Any, dtype: str) -> bool:
    """Equal bit by bit, but for the payloads of NaN."""
    a, b = (np.ascontiguousarray(x) for x in (a, b))
    return bool(np.all((a.view(BITS[dtype]) == b.view(BITS[dtype])) | (np.isnan(a) & np.isnan(b))))


def test_written_tokens_are_read_back_rounded(isa: str, dtype: str, block_size: int) -> None:
    cache = new_cache(isa, dtype, block_size)
    capacity = 6 * block_size
    slots = np.random.default_rng(0).permutation(capacity)[: max(1, capacity * 2 // 3)].astype(np.int32)
    x = tokens(len(slots))
    write(isa, cache, 1, x, slots)

    kept = rounded(x, dtype)
    for found, wanted in zip(cache.read(1), (kept[:, : HEADS * DIM], kept[:, HEADS * DIM :]), strict=True):
        flat = found.reshape(capacity, HEADS * DIM)
        assert same_bits(flat[slots], wanted, dtype)
        assert np.isnan(np.delete(flat, slots, axis=0)).all(), "a slot that nobody wrote has changed"
    for layer in (0, 2):
        assert all(np.isnan(found).all() for found in cache.read(layer)), "another layer has changed"


def test_copied_blocks_are_equal_in_all_layers(isa: str, dtype: str, block_size: int) -> None:
    cache = new_cache(isa, dtype, block_size)
    for layer in range(LAYERS):
        write(isa, cache, layer, tokens(6 * block_size) + layer, np.arange(6 * block_size, dtype=np.int32))
    before = [cache.read(layer) for layer in range(LAYERS)]

    sizes = np.zeros(len(Size), np.int32)
    sources, targets = np.array([4, 0, 5], np.int32), np.array([1, 3, 2], np.int32)
    program = native(isa, 2).program(sizes)
    program.copy_blocks(cache, sources, targets)
    sizes[Size.COPIES] = 2
    program.run()
    for layer in range(LAYERS):
        for found, old in zip(cache.read(layer), before[layer], strict=True):
            wanted = old.copy()
            wanted[[1, 3]] = old[[4, 0]]
            assert same_bits(found, wanted, dtype)


def test_a_filled_block_holds_one_value(isa: str, dtype: str, block_size: int) -> None:
    cache = new_cache(isa, dtype, block_size)
    cache.fill([2, 5], 1.5)
    for layer in range(LAYERS):
        for found in cache.read(layer):
            assert (found[[2, 5]] == 1.5).all()
            assert np.isnan(found[[0, 1, 3, 4]]).all()
