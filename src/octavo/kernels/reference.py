"""The definition of every op, in plain NumPy. Slow, and what all other backends must agree with.

Runs in float32 with weights in float32 or bfloat16, and in float64 throughout, as an oracle for tolerances.
Rows are computed one by one, so a row's result cannot depend on the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.kernels.dequantize import num_bytes, packed_formats
from octavo.kernels.ops import (
    Array,
    AttentionBatch,
    Int32,
    KVCache,
    KVShape,
    LinearWeight,
    SampleBatch,
    SampleOutput,
    Size,
    StepColumns,
    TensorSource,
)
from octavo.kernels.quantize import check_quantisable, quantize
from octavo.kernels.reference_sampling import sample
from octavo.kernels.reference_storage import DTYPES, ReferenceKVCache, ReferenceWeight, load, own_weight, read_matrix


def linear(x: Array, weight: ReferenceWeight) -> Array:
    """``x @ weight.T + bias``, one row at a time. x: [rows, in_features]; returns [rows, out_features]."""
    rows = [np.concatenate([part.multiply(row) for part in weight.parts]) for row in x]
    out = np.array(rows).reshape(len(x), weight.out_features)
    return out if weight.bias is None else out + weight.bias


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """``x / sqrt(mean(x**2) + eps) * weight``. x: [rows, hidden]."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight)


def rotary(x: Array, positions: Int32, cos: Array, sin: Array, num_heads: int) -> None:
    """Rotate ``x`` [rows, num_heads x head_dim] in place, dimension d with d + half."""
    half = cos.shape[1]
    heads = x.reshape(len(x), num_heads, -1)
    c, s = cos[positions][:, None], sin[positions][:, None]
    first, second = heads[..., :half].copy(), heads[..., half : 2 * half].copy()
    heads[..., :half] = first * c - second * s
    heads[..., half : 2 * half] = second * c + first * s
    x[:] = heads.reshape(x.shape)


def activation(x: Array, kind: str) -> Array:
    """silu: x * sigmoid(x). gelu: x * Phi(x). gelu_tanh: its approximation (Hendrycks & Gimpel, arXiv 1606.08415)."""
    if kind == "silu":
        with np.errstate(over="ignore"):
            return np.asarray(x / (1 + np.exp(-x)))
    if kind == "gelu_tanh":
        return np.asarray(0.5 * x * (1 + np.tanh(x.dtype.type(np.sqrt(2 / np.pi)) * (x + x.dtype.type(0.044715) * x**3))))
    return np.asarray(0.5 * x * (1 + _erf(x / np.sqrt(x.dtype.type(2)))))


def _erf(x: Array) -> Array:
    return np.asarray(np.vectorize(math.erf, otypes=[x.dtype])(x))


def attend(q: Array, keys: Array, values: Array, scale: float, softcap: float | None) -> Array:
    """One row's attention. q: [heads, head_dim]; keys, values: [positions, kv_heads, head_dim]; returns [heads, head_dim].

    Products' inputs are in the dtype of the keys: q and the probabilities are rounded to it; sums are in float32 (or float64).
    Keys and values of an int8 cache come as the floats that they mean.
    """
    dtype = keys.dtype
    real = np.float64 if dtype == np.float64 else np.float32
    kv_heads, head_dim = keys.shape[1:]
    grouped = q.astype(dtype).astype(real).reshape(kv_heads, -1, head_dim)
    k = np.ascontiguousarray(keys.transpose(1, 2, 0), real)
    v = np.ascontiguousarray(values.transpose(1, 0, 2), real)
    scores = np.matmul(grouped, k) * real(scale)
    if softcap:
        scores = real(softcap) * np.tanh(scores / real(softcap))
    weights = np.exp(scores - scores.max(-1, keepdims=True)).astype(dtype).astype(real)
    return np.asarray((weights @ v) / weights.sum(-1, keepdims=True)).reshape(q.shape)


def paged_attention(
    q: Array, batch: AttentionBatch, cache: ReferenceKVCache, layer: int, num_requests: int,
    scale: float, window: int | None, softcap: float | None,
) -> Array:  # fmt: skip
    """All rows of a ragged batch; q: [rows, heads x head_dim]. Keys are gathered through the table, and only those seen."""
    out = np.empty_like(q)
    size, head_dim = cache.shape.block_size, cache.shape.head_dim
    for i in range(num_requests):
        table = batch.block_tables[batch.table_rows[i]]
        for row in range(batch.query_starts[i], batch.query_starts[i + 1]):
            last = int(batch.positions[row])
            seen = np.arange(max(0, last - window + 1) if window else 0, last + 1)
            blocks, offsets = table[seen // size], seen % size
            keys, values = cache.keys[layer, blocks, offsets], cache.values[layer, blocks, offsets]
            out[row] = attend(q[row].reshape(-1, head_dim), keys, values, scale, softcap).reshape(-1)
    return out


def lay_out_rows(columns: StepColumns, batch: AttentionBatch, token_ids: Int32, history: Int32, block_size: int, num_requests: int) -> None:
    """Put new blocks into the tables; place each request's tokens in rows, positions, slots and history."""
    row = used = 0
    for i in range(num_requests):
        t, first, count, new = batch.table_rows[i], columns.num_computed[i], columns.num_scheduled[i], columns.num_new_blocks[i]
        if new:
            start = -(-first // block_size) - columns.replaced[i]
            batch.block_tables[t, start : start + new] = columns.new_block_ids[used : used + new]
        positions = np.arange(first, first + count)
        batch.query_starts[i : i + 2] = row, row + count
        batch.positions[row : row + count] = positions
        batch.slots[row : row + count] = batch.block_tables[t, positions // block_size] * block_size + positions % block_size
        history[t, positions] = token_ids[row : row + count]
        row, used = row + count, used + new


def lay_out_samples(
    columns: StepColumns, batch: AttentionBatch, params: Array, sampled_rows: Int32, rows: Array, num_requests: int
) -> None:
    """Repeat each request's last row and parameters for its samples; with drafts, take the last rows."""
    request = np.repeat(np.arange(num_requests), columns.num_samples[:num_requests])
    n = len(request)
    number = np.arange(n) - np.searchsorted(request, request)
    num_drafts = columns.num_drafts[request]
    left = np.where(num_drafts > 0, num_drafts - number, 0)
    sampled_rows[:n] = batch.query_starts[request + 1] - 1 - left
    rows[:n] = params[batch.table_rows[request]]
    rows["num_known"][:n] = columns.num_computed[request] + columns.num_scheduled[request] - left
    rows["position"][:n] = rows["num_known"][:n] - rows["prompt_len"][:n]
    several = (columns.num_samples[request] > 1) & (num_drafts == 0)
    rows["sample_index"][:n][several] = number[several]


class ReferenceProgram:
    """Recorded calls of the functions above, over the first ``sizes[count]`` rows of their arrays."""

    def __init__(self, sizes: Int32) -> None:
        self._sizes = sizes
        self._calls: list[Callable[[], None]] = []

    def run(self) -> None:
        for call in self._calls:
            call()

    def _record(self, call: Callable[..., None], *args: Any) -> None:
        self._calls.append(partial(call, *args))

    def lay_out_rows(self, columns: StepColumns, batch: AttentionBatch, token_ids: Int32, history: Int32, block_size: int) -> None:
        def call() -> None:
            lay_out_rows(columns, batch, token_ids, history, block_size, self._sizes[Size.REQUESTS])

        self._record(call)

    def lay_out_samples(
        self, columns: StepColumns, batch: AttentionBatch, params: NDArray[np.void], sampled_rows: Int32, rows: NDArray[np.void]
    ) -> None:
        def call() -> None:
            lay_out_samples(columns, batch, params, sampled_rows, rows, self._sizes[Size.REQUESTS])

        self._record(call)

    def embed(self, token_ids: Int32, table: LinearWeight, out: Array) -> None:
        def call(matrix: Array) -> None:
            n = self._sizes[Size.ROWS]
            out[:n] = matrix[token_ids[:n]]

        self._record(call, own_weight(table).matrix)

    def linear(self, x: Array, weight: LinearWeight, out: Array, count: Size = Size.ROWS) -> None:
        def call(weight: ReferenceWeight) -> None:
            n = self._sizes[count]
            out[:n] = linear(x[:n], weight)

        self._record(call, own_weight(weight))

    def rms_norm(self, x: Array, weight: Array, out: Array, eps: float, count: Size = Size.ROWS) -> None:
        def call() -> None:
            n = self._sizes[count]
            out[:n] = rms_norm(x[:n], weight, eps)

        self._record(call)

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, out: Array, eps: float, count: Size = Size.ROWS) -> None:
        def call() -> None:
            n = self._sizes[count]
            residual[:n] += x[:n]
            out[:n] = rms_norm(residual[:n], weight, eps)

        self._record(call)

    def rotary(self, x: Array, positions: Int32, cos: Array, sin: Array, num_heads: int) -> None:
        def call() -> None:
            n = self._sizes[Size.ROWS]
            rotary(x[:n], positions[:n], cos, sin, num_heads)

        self._record(call)

    def write_kv(self, k: Array, v: Array, slots: Int32, cache: KVCache, layer: int) -> None:
        def call(cache: ReferenceKVCache) -> None:
            n, shape = self._sizes[Size.ROWS], cache.shape
            blocks, offsets = np.divmod(slots[:n], shape.block_size)
            keys, values = (x[:n].reshape(n, shape.num_kv_heads, shape.head_dim) for x in (k, v))
            cache.write(layer, blocks, offsets, keys, values)

        assert isinstance(cache, ReferenceKVCache)
        self._record(call, cache)

    def paged_attention(
        self, q: Array, batch: AttentionBatch, cache: KVCache, layer: int, out: Array,
        scale: float, window: int | None = None, softcap: float | None = None,
    ) -> None:  # fmt: skip
        def call(cache: ReferenceKVCache) -> None:
            n = self._sizes[Size.ROWS]
            out[:n] = paged_attention(q[:n], batch, cache, layer, self._sizes[Size.REQUESTS], scale, window, softcap)

        assert isinstance(cache, ReferenceKVCache)
        self._record(call, cache)

    def gated_activation(self, gate_up: Array, out: Array, kind: str) -> None:
        def call() -> None:
            n, half = self._sizes[Size.ROWS], gate_up.shape[1] // 2
            out[:n] = activation(gate_up[:n, :half], kind) * gate_up[:n, half:]

        self._record(call)

    def gather_rows(self, x: Array, indices: Int32, out: Array) -> None:
        def call() -> None:
            n = self._sizes[Size.SAMPLES]
            out[:n] = x[indices[:n]]

        self._record(call)

    def copy_blocks(self, cache: KVCache, sources: Int32, targets: Int32) -> None:
        def call(cache: ReferenceKVCache) -> None:
            n = self._sizes[Size.COPIES]
            for pool in (cache.keys, cache.values):
                pool[:, targets[:n]] = pool[:, sources[:n]]

        assert isinstance(cache, ReferenceKVCache)
        self._record(call, cache)

    def sample(self, logits: Array, batch: SampleBatch, out: SampleOutput) -> None:
        def call() -> None:
            for s in range(self._sizes[Size.SAMPLES]):
                sample(logits[s], batch, s, out)

        self._record(call)


class ReferenceBackend:
    """The backend of these definitions; ``precision="float64"`` does all arithmetic in float64."""

    def __init__(self, precision: str = "float32") -> None:
        self.name = "reference (NumPy)"
        self._real = DTYPES[precision]

    def pack(self, sources: Sequence[TensorSource], format: str, biases: Sequence[TensorSource] = ()) -> ReferenceWeight:
        formats = packed_formats([source.format for source in sources], format)
        parts = tuple(read_matrix(source, packed, self._real) for source, packed in zip(sources, formats, strict=True))
        bias = np.concatenate([self.vector(source) for source in biases]) if biases else None
        nbytes = sum(num_bytes(packed, int(np.prod(source.shape))) for source, packed in zip(sources, formats, strict=True))
        return ReferenceWeight(parts, bias, nbytes)

    def quantize(self, source: TensorSource, format: str) -> TensorSource:
        check_quantisable(format, source.shape[1])
        try:
            return TensorSource(source.name, source.shape, format, quantize(format, load(source)))
        except ValueError as error:
            raise ModelLoadError(f"{source.name} cannot be quantised: {error}") from error

    def vector(self, source: TensorSource) -> Array:
        return load(source).astype(self._real)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return np.empty(shape, self._real if dtype == "float32" or self._real is np.float64 else DTYPES[dtype])

    def kv_cache(self, shape: KVShape) -> ReferenceKVCache:
        return ReferenceKVCache(shape, self._real)

    def program(self, sizes: Int32) -> ReferenceProgram:
        return ReferenceProgram(sizes)
