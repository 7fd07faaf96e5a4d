"""Runs requests through a backend's write_kv and paged_attention, step by step, in a poisoned pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import ml_dtypes
import numpy as np

from octavo.kernels.ops import AttentionBatch, Backend, KVCache, KVShape, Program, Size
from octavo.kernels.reference import attend
from octavo.kernels.reference_storage import round_to_int8

DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
KV_DTYPES = ("bfloat16", "float32", "int8")
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-9}
EXP_ERROR = 2.4e-7
NEVER_READ = np.iinfo(np.int32).max // 2  # a block id that ends the process where it is followed


@dataclass(frozen=True)
class Layer:
    """What may differ between the layers that share one plan."""

    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Case:
    """Requests whose queries, keys and values are drawn from a seed."""

    lengths: tuple[int, ...]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 32
    dtype: str = "bfloat16"
    layers: tuple[Layer, ...] = (Layer(),)
    spread: float = 1.0  # of the queries: the larger, the sharper the probabilities

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def columns(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values."""
        return self.kv_heads * self.group * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    def tokens(self, request: int) -> Any:
        """[length, queries + keys + values] float32, as a fused product leaves them."""
        rows = np.random.default_rng((7, request)).standard_normal((self.lengths[request], sum(self.columns)), np.float32)
        rows[:, : self.columns[0]] *= self.spread
        return rows


class Pool:
    """Blocks dealt in random order to the requests of a case, full of NaN wherever nothing was written."""

    def __init__(self, backend: Backend, case: Case, block_size: int, seed: int) -> None:
        counts = [-(-length // block_size) for length in case.lengths]
        num_blocks = sum(counts) + 2
        self.block_size = block_size
        self.cache: KVCache = backend.kv_cache(KVShape(len(case.layers), num_blocks, block_size, case.kv_heads, case.head_dim, case.dtype))
        self.cache.fill(range(num_blocks), float("nan"))
        order = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
        self.tables = np.full((len(counts), max(counts) + 1), NEVER_READ, np.int32)
        for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
            self.tables[row, :count] = order[end - count : end]

    def slots(self, request: int, positions: Any) -> Any:
        return self.tables[request, positions // self.block_size] * self.block_size + positions % self.block_size


def steps(lengths: Sequence[int], chunks: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Steps of (request, first, end): each takes its next chunk size from the cycle; requests end at different times."""
    sizes, done = cycle(chunks), [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        step = [(i, d, min(d + next(sizes), n)) for i, (d, n) in enumerate(zip(done, lengths, strict=True)) if d < n]
        for i, _, end in step:
            done[i] = end
        yield step


class Stepper:
    """One recorded program: every layer writes the step's keys and values and attends."""

    def __init__(self, backend: Backend, case: Case, pool: Pool, out_dtype: str) -> None:
        max_rows, requests = sum(case.lengths), len(case.lengths)
        self.pool, self.case = pool, case
        self.sizes = np.zeros(len(Size), np.int32)
        self.qkv = backend.empty((max_rows, sum(case.columns)), "float32")
        self.slots = np.zeros(max_rows, np.int32)
        zeros = np.zeros(requests, np.int32)
        self.batch = AttentionBatch(np.zeros(requests + 1, np.int32), zeros, pool.tables, np.zeros(max_rows, np.int32), self.slots)
        self.outs = [backend.empty((max_rows, case.columns[0]), out_dtype) for _ in case.layers]
        self.program = backend.program(self.sizes)
        self._record(self.program)

    def _record(self, program: Program) -> None:
        q, k, _ = np.cumsum(self.case.columns)
        for i, (layer, out) in enumerate(zip(self.case.layers, self.outs, strict=True)):
            program.write_kv(self.qkv[:, q:k], self.qkv[:, k:], self.slots, self.pool.cache, i)
            program.paged_attention(
                self.qkv[:, :q], self.batch, self.pool.cache, i, out, self.case.scale, layer.window, layer.softcap
            )  # fmt: skip

    def run(self, step: list[tuple[int, int, int]], tokens: list[Any]) -> None:
        rows = 0
        for i, (request, first, end) in enumerate(step):
            here = slice(rows, rows + end - first)
            self.qkv[here] = tokens[request][first:end]
            self.batch.positions[here] = np.arange(first, end)
            self.slots[here] = self.pool.slots(request, np.arange(first, end))
            self.batch.table_rows[i] = request
            rows = here.stop
            self.batch.query_starts[i + 1] = rows
        self.sizes[Size.ROWS], self.sizes[Size.REQUESTS] = rows, len(step)
        self.program.run()


def attention(
    backend: Backend, case: Case, block_size: int = 16, chunks: Sequence[int] = (1 << 20,), seed: int = 0, out_dtype: str = "float32"
) -> list[list[Any]]:
    """[layer][request] -> [length, heads x head_dim], computed in the steps that the chunks make."""
    tokens = [case.tokens(i) for i in range(len(case.lengths))]
    stepper = Stepper(backend, case, Pool(backend, case, block_size, seed), out_dtype)
    results = [[np.empty((n, case.columns[0]), stepper.outs[0].dtype) for n in case.lengths] for _ in case.layers]
    for step in steps(case.lengths, chunks):
        stepper.run(step, tokens)
        for out, per_request in zip(stepper.outs, results, strict=True):
            rows = 0
            for request, first, end in step:
                per_request[request][first:end] = out[rows : rows + end - first]
                rows += end - first
    return results


def exact_row(case: Case, layer: Layer, request: int, position: int) -> tuple[Any, Any]:
    """The definition in float64 for one row, from inputs rounded as the cache rounds them, and how far off a kernel may be.

    With weights w: each is off by a factor of 1 + e, so the output by 2 e sum(w |v|) at most. Of e:
      scores      (head_dim + 3) roundings of scale * sum(|q| |k|), twice, since the maximum's own error is subtracted
      exp         its own error, once per tile of a chunk and chunk that a running state passes, and the rounding of its argument
      p           rounded to the cache's dtype
      sums        a rounding per key of a chunk, tile and merge
    With int8, q and p become 16-bit integers instead (``code_errors``).
    """
    q, k, v = rounded_tokens(case, request)
    seen = slice(max(0, position - layer.window + 1) if layer.window else 0, position + 1)
    heads = q[position].reshape(-1, case.head_dim)
    keys, values = (x[seen].reshape(-1, case.kv_heads, case.head_dim) for x in (k, v))
    exact, magnitude = (attend(heads, keys, x, case.scale, layer.softcap) for x in (values, np.abs(values)))

    u, n, chunks = ROUNDING["float32"], len(keys), position // 512 + 1
    products = case.scale * np.einsum("hd,nhd->hn", np.abs(heads), np.repeat(np.abs(keys), case.group, axis=1)).max(1)
    error = 2 * (case.head_dim + 3) * u * products + 2 * u * products
    error += 2 * (layer.softcap or 0.0) * (EXP_ERROR + 4 * u)
    error += EXP_ERROR * (17 + 2 * chunks) + ROUNDING["bfloat16"] * (case.dtype == "bfloat16")
    error += (min(n, 512) + 16 + 3 * chunks) * u
    if case.dtype != "int8":
        return exact.reshape(-1), (2 * error[:, None] * magnitude).reshape(-1)
    scores, outputs = code_errors(case, layer, heads, keys, values)
    return exact.reshape(-1), (2 * (error + 2 * scores)[:, None] * magnitude + outputs).reshape(-1)


def rounded_tokens(case: Case, request: int) -> list[Any]:
    """Queries, keys and values in float64, keys and values as the cache keeps them, and queries too, but for int8."""
    tokens = case.tokens(request)
    if case.dtype != "int8":
        tokens = tokens.astype(DTYPES[case.dtype])
    q, k, v = np.split(tokens, np.cumsum(case.columns)[:2], axis=1)
    if case.dtype == "int8":
        k, v = (round_to_int8(x.reshape(-1, case.kv_heads, case.head_dim)).reshape(x.shape) for x in (k, v))
    return [x.astype(np.float64) for x in (q, k, v)]


def code_errors(case: Case, layer: Layer, heads: Any, keys: Any, values: Any) -> tuple[Any, Any]:
    """What 16-bit integers add, per head: to scores, and to the output.

    q   each of its elements is off by half a unit, max |q| / 32767
    p   each p x scale of a tile is off by half a unit, the tile's largest / 32767, and multiplied with a code of at most 127. The largest
        of a tile is at most the sum over its 32 keys: 32 x 127 x sum(w x scale) / 65534 in all
    """
    scores = case.scale * np.abs(heads).max(-1) / 65534 * np.repeat(np.abs(keys).sum(-1).max(0), case.group)
    scales = np.broadcast_to(np.abs(values).max(-1, keepdims=True) * (1 + 2.0**-7) / 127, values.shape)
    weighed = attend(heads, keys, scales, case.scale, layer.softcap)
    return scores * (1 + 2.0**-16), 1.01 * 32 * 127 / 65534 * weighed
