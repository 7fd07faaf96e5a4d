"""Paged attention by itself, in one layer, with blocks that lie scattered; and how long it takes with each block size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from octavo.blocks import blocks_for
from octavo.config import LEGAL_BLOCK_SIZES
from octavo.kernels.ops import AttentionBatch, Backend, Int32, KVCache, KVShape, Size
from octavo.models.spec import DecoderSpec
from octavo.planner.profile import AttentionTime

KV_BYTES = 48 * 2**20
"""Keys and values read by one decode: more than processors' caches hold."""
CONTEXT, PROMPT = 2048, 1024
REPEATS = 7


class AttentionCase:
    """Requests of one context length in a pool filled at random, each with its last ``queries`` tokens to attend."""

    def __init__(
        self, backend: Backend, spec: DecoderSpec, dtype: str, block_size: int, num_requests: int, context: int, queries: int
    ) -> None:
        chance = np.random.default_rng(1)
        per_request = blocks_for(context, block_size)
        shape = KVShape(1, num_requests * per_request, block_size, spec.num_kv_heads, spec.head_dim, dtype)
        tables = chance.permutation(shape.num_blocks).astype(np.int32).reshape(num_requests, per_request)
        cache, rows = backend.kv_cache(shape), num_requests * queries
        _fill(backend, cache, tables, context, chance)
        batch = AttentionBatch(
            query_starts=np.arange(0, rows + 1, queries, dtype=np.int32),
            table_rows=np.arange(num_requests, dtype=np.int32),
            block_tables=tables,
            positions=np.tile(np.arange(context - queries, context, dtype=np.int32), num_requests),
            slots=np.zeros(rows, np.int32),
        )
        q = backend.empty((rows, spec.num_heads * spec.head_dim), "float32")
        q[:] = chance.normal(size=q.shape)
        sizes = np.zeros(len(Size), np.int32)
        sizes[Size.ROWS], sizes[Size.REQUESTS] = rows, num_requests
        program = backend.program(sizes)
        program.paged_attention(
            q, batch, cache, 0, backend.empty(q.shape, "float32" if dtype == "float32" else "bfloat16"), spec.attention_scale
        )
        self.run: Callable[[], None] = program.run
        self._kept = cache, batch, q


def _fill(backend: Backend, cache: KVCache, tables: Int32, context: int, chance: np.random.Generator) -> None:
    """Write random keys and values through the tables."""
    size, count = cache.shape.block_size, min(context, 4096)
    kv = backend.empty((count, cache.shape.num_kv_heads * cache.shape.head_dim), "float32")
    kv[:] = chance.normal(size=kv.shape)
    slots, sizes = np.zeros(count, np.int32), np.zeros(len(Size), np.int32)
    program = backend.program(sizes)
    program.write_kv(kv, kv, slots, cache, 0)
    for table in tables:
        for start in range(0, context, count):
            at = np.arange(start, min(context, start + count))
            slots[: len(at)] = table[at // size] * size + at % size
            sizes[Size.ROWS] = len(at)
            program.run()


def measure_block_sizes(backend: Backend, spec: DecoderSpec, dtype: str, progress: Callable[[], None]) -> dict[int, AttentionTime]:
    """Seconds of attention in one layer for each legal block size: medians, the sizes in turns. ``progress`` hears of each turn."""
    num_requests = max(1, KV_BYTES // (spec.kv_bytes_per_token(dtype) // spec.num_layers * CONTEXT))
    cases = {
        size: (
            AttentionCase(backend, spec, dtype, size, num_requests, CONTEXT, 1),
            AttentionCase(backend, spec, dtype, size, 1, PROMPT, PROMPT),
        )
        for size in LEGAL_BLOCK_SIZES
    }
    times: dict[int, tuple[list[float], list[float]]] = {size: ([], []) for size in cases}
    for turn in range(REPEATS + 1):
        for size, pair in cases.items():
            for case, found in zip(pair, times[size], strict=True):
                begin = time.perf_counter()
                case.run()
                if turn:  # the first one touches memory for the first time
                    found.append(time.perf_counter() - begin)
        progress()
    keys, pairs = num_requests * CONTEXT, PROMPT * (PROMPT + 1) // 2
    return {
        size: AttentionTime(statistics.median(decode) / keys, statistics.median(prefill) / pairs)
        for size, (decode, prefill) in times.items()
    }
