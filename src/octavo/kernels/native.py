"""Stage 5 of 7: paged attention and all other ops on the CPU, in C++. Before it: ``blocks.block_table``. After it: ``models``.

Checks arrays by named sizes, records their addresses in a native program and keeps them alive. What the ops compute
is defined in ``reference.py``; layouts of weights and of the KV pool are drawn in ``csrc/kernels.h``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo import _native
from octavo.errors import ConfigError, ModelLoadError
from octavo.kernels.cpus import default_threads
from octavo.kernels.memory import Arena, Bytes, map_memory
from octavo.kernels.ops import (
    ACTIVATIONS,
    MAX_TOP,
    SAMPLE_ROW,
    Array,
    AttentionBatch,
    Int32,
    KVCache,
    KVShape,
    LinearWeight,
    SampleBatch,
    SampleOutput,
    Size,
    TensorSource,
)
from octavo.kernels.shapes import BFLOAT16, DTYPES, FLOAT32, INT32, UINT32, ShapeChecker, address, stride

_PANEL = 16
_FORMATS = {name: (i, block_size, block_bytes) for i, (name, block_size, block_bytes) in enumerate(_native.formats())}

assert _native.sample_row_bytes() == SAMPLE_ROW.itemsize, "SampleRow in csrc/kernels.h must mirror SAMPLE_ROW in ops.py"


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeight:
    """A matrix in the packed layout of csrc/packed.h."""

    matrix: _native.PackedMatrix
    dtype: np.dtype[np.generic]
    out_features: int
    in_features: int
    data: Bytes
    bias: Array | None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)


class NativeKVCache:
    """The KV pool in the block layout of csrc/kernels.h."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.dtype = DTYPES[shape.dtype]
        per_block = 2 * shape.block_size * shape.num_kv_heads * shape.head_dim
        self.nbytes = shape.num_layers * shape.num_blocks * per_block * self.dtype.itemsize
        self._data = map_memory(self.nbytes)
        self.layout = _native.KVLayout(
            address(self._data), shape.num_layers, shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim,
            self.dtype == BFLOAT16,
        )  # fmt: skip

    def read(self, layer: int) -> tuple[Array, Array]:
        s = self.shape
        full = (s.num_blocks, s.block_size, s.num_kv_heads, s.head_dim)
        keys, values = np.empty(full, self.dtype), np.empty(full, self.dtype)
        self.layout.read(layer, address(keys), address(values))
        return keys, values

    def fill(self, block_ids: Sequence[int], value: float) -> None:
        for block in block_ids:
            if not 0 <= block < self.shape.num_blocks:
                raise ValueError(f"block {block} is not one of the cache's {self.shape.num_blocks}")
            self.layout.fill(block, value)


class NativeProgram:
    """A recorded step. Each op checks its arrays once, here; ``run`` is one native call that releases the GIL."""

    def __init__(self, kernels: _native.Kernels, pool: _native.Pool, sizes: Int32) -> None:
        ShapeChecker("program", sizes=len(Size))("sizes", sizes, ("sizes",), INT32)
        self._program = _native.Program(kernels, pool)
        self._threads = pool.num_threads
        self._sizes = sizes
        self._alive: list[object] = [sizes]
        self._batches: dict[int, _native.AttentionBatch] = {}

    def run(self) -> None:
        self._program.run()

    def _count(self, size: Size) -> int:
        return address(self._sizes) + int(size) * self._sizes.itemsize

    def _keep(self, *objects: object) -> None:
        self._alive.extend(objects)

    def embed(self, token_ids: Int32, table: LinearWeight, out: Array) -> None:
        weight = _own(table)
        check = ShapeChecker("embed", in_features=weight.in_features)
        check("out", out, ("max_rows", "in_features"), FLOAT32)
        check("token_ids", token_ids, ("max_rows",), INT32)
        self._program.embed(address(token_ids), weight.matrix, address(out), stride(out), self._count(Size.ROWS))
        self._keep(token_ids, weight, out)

    def linear(self, x: Array, weight: LinearWeight, out: Array, count: Size = Size.ROWS) -> None:
        w = _own(weight)
        check = ShapeChecker("linear", in_features=w.in_features, out_features=w.out_features)
        check("x", x, ("max_rows", "in_features"), w.dtype)
        check("out", out, ("max_rows", "out_features"), FLOAT32)
        self._program.linear(address(x), stride(x), w.matrix, address(out), stride(out), self._count(count))
        self._keep(x, w, out)

    def rms_norm(self, x: Array, weight: Array, out: Array, eps: float, count: Size = Size.ROWS) -> None:
        self._norm(ShapeChecker("rms_norm"), x, None, weight, out, eps, count)

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, out: Array, eps: float, count: Size = Size.ROWS) -> None:
        check = ShapeChecker("add_rms_norm")
        check("residual", residual, ("max_rows", "hidden"), FLOAT32)
        self._norm(check, x, residual, weight, out, eps, count)

    def _norm(self, check: ShapeChecker, x: Array, residual: Array | None, weight: Array, out: Array, eps: float, count: Size) -> None:
        check("x", x, ("max_rows", "hidden"), FLOAT32)
        check("weight", weight, ("hidden",), FLOAT32)
        check("out", out, ("max_rows", "hidden"), FLOAT32, BFLOAT16)
        residual_stride = 0 if residual is None else stride(residual)
        self._program.rms_norm(
            address(x), stride(x), address(residual), residual_stride, address(weight), address(out), stride(out),
            out.dtype == BFLOAT16, x.shape[1], eps, self._count(count),
        )  # fmt: skip
        self._keep(x, residual, weight, out)

    def rotary(self, x: Array, positions: Int32, cos: Array, sin: Array, num_heads: int) -> None:
        check = ShapeChecker("rotary")
        check("x", x, ("max_rows", "num_heads x head_dim"), FLOAT32)
        check("positions", positions, ("max_rows",), INT32)
        check("cos", cos, ("max_positions", "half"), FLOAT32)
        check("sin", sin, ("max_positions", "half"), FLOAT32)
        head_dim, rest = divmod(x.shape[1], num_heads)
        if rest or 2 * cos.shape[1] > head_dim or not (cos.flags.c_contiguous and sin.flags.c_contiguous):
            raise ValueError(f"rotary: {num_heads} heads in {x.shape[1]} columns cannot rotate {cos.shape[1]} contiguous pairs each")
        self._program.rotary(
            address(x), stride(x), address(positions), address(cos), address(sin), cos.shape[1], num_heads, head_dim,
            self._count(Size.ROWS),
        )  # fmt: skip
        self._keep(x, positions, cos, sin)

    def write_kv(self, k: Array, v: Array, slots: Int32, cache: KVCache, layer: int) -> None:
        own = _own_cache(cache, layer)
        check = ShapeChecker("write_kv", **{"num_kv_heads x head_dim": own.shape.num_kv_heads * own.shape.head_dim})
        check("k", k, ("max_rows", "num_kv_heads x head_dim"), FLOAT32)
        check("v", v, ("max_rows", "num_kv_heads x head_dim"), FLOAT32)
        check("slots", slots, ("max_rows",), INT32)
        self._program.write_kv(
            address(k), stride(k), address(v), stride(v), address(slots), own.layout, layer, self._count(Size.ROWS)
        )  # fmt: skip
        self._keep(k, v, slots, own)

    def paged_attention(
        self, q: Array, batch: AttentionBatch, cache: KVCache, layer: int, out: Array,
        scale: float, window: int | None = None, softcap: float | None = None,
    ) -> None:  # fmt: skip
        own = _own_cache(cache, layer)
        check = ShapeChecker("paged_attention")
        check("q", q, ("max_rows", "num_heads x head_dim"), FLOAT32)
        check("out", out, ("max_rows", "num_heads x head_dim"), FLOAT32, BFLOAT16)
        num_heads, rest = divmod(q.shape[1], own.shape.head_dim)
        if rest or num_heads % own.shape.num_kv_heads:
            raise ValueError(f"paged_attention: {q.shape[1]} columns of q are not a multiple of the cache's heads, {own.shape}")
        native_batch = self._batch(check, batch)
        self._program.paged_attention(
            address(q), stride(q), native_batch, own.layout, layer, address(out), stride(out), out.dtype == BFLOAT16,
            num_heads, scale, window or 0, softcap or 0.0, batch.table_rows.shape[0], q.shape[0],
        )  # fmt: skip
        self._keep(q, own, out)

    def _batch(self, check: ShapeChecker, batch: AttentionBatch) -> _native.AttentionBatch:
        """One native batch per batch object, so that its work is planned once for all layers."""
        check("table_rows", batch.table_rows, ("max_requests",), INT32)
        check.sizes["max_requests + 1"] = check.sizes["max_requests"] + 1
        check("query_starts", batch.query_starts, ("max_requests + 1",), INT32)
        check("block_tables", batch.block_tables, ("max_num_seqs", "max_blocks_per_request"), INT32)
        check("positions", batch.positions, ("max_rows",), INT32)
        if id(batch) not in self._batches:
            self._keep(batch)
            self._batches[id(batch)] = _native.AttentionBatch(
                address(batch.query_starts), address(batch.table_rows), address(batch.block_tables), stride(batch.block_tables),
                address(batch.positions), self._count(Size.REQUESTS), self._count(Size.ROWS),
            )  # fmt: skip
        return self._batches[id(batch)]

    def gated_activation(self, gate_up: Array, out: Array, kind: str) -> None:
        if kind not in ACTIVATIONS:
            raise ValueError(f"gated_activation: {kind!r} is not known; choose one of {', '.join(ACTIVATIONS)}")
        check = ShapeChecker("gated_activation")
        check("out", out, ("max_rows", "n"), FLOAT32, BFLOAT16)
        check.sizes["2n"] = 2 * check.sizes["n"]
        check("gate_up", gate_up, ("max_rows", "2n"), FLOAT32)
        self._program.gated_activation(
            address(gate_up), stride(gate_up), address(out), stride(out), out.dtype == BFLOAT16, out.shape[1],
            ACTIVATIONS.index(kind), self._count(Size.ROWS),
        )  # fmt: skip
        self._keep(gate_up, out)

    def gather_rows(self, x: Array, indices: Int32, out: Array) -> None:
        check = ShapeChecker("gather_rows")
        check("x", x, ("max_rows", "size"), FLOAT32)
        check("out", out, ("max_samples", "size"), FLOAT32)
        check("indices", indices, ("max_samples",), INT32)
        self._program.gather_rows(
            address(x), stride(x), address(indices), address(out), stride(out), x.shape[1], self._count(Size.SAMPLES)
        )  # fmt: skip
        self._keep(x, indices, out)

    def copy_blocks(self, cache: KVCache, sources: Int32, targets: Int32) -> None:
        own = _own_cache(cache, 0)
        check = ShapeChecker("copy_blocks")
        check("sources", sources, ("max_copies",), INT32)
        check("targets", targets, ("max_copies",), INT32)
        self._program.copy_blocks(own.layout, address(sources), address(targets), self._count(Size.COPIES))
        self._keep(own, sources, targets)

    def sample(self, logits: Array, batch: SampleBatch, out: SampleOutput) -> None:
        check = ShapeChecker("sample", max_top=MAX_TOP)
        check("logits", logits, ("max_samples", "vocab"), FLOAT32)
        check.sizes["mask_words"] = -(-logits.shape[1] // 32)
        check("rows", batch.rows, ("max_samples",), SAMPLE_ROW)
        check("history", batch.history, ("max_num_seqs", "max_model_len"), INT32)
        check("bias_ids", batch.bias_ids, ("capacity",), INT32)
        check("bias_values", batch.bias_values, ("capacity",), FLOAT32)
        check("masks", batch.masks, ("max_num_seqs", "mask_words"), UINT32)
        check("token_ids", out.token_ids, ("max_samples",), INT32)
        check("logprobs", out.logprobs, ("max_samples",), FLOAT32)
        check("ranks", out.ranks, ("max_samples",), INT32)
        check("top_ids", out.top_ids, ("max_samples", "max_top"), INT32)
        check("top_logprobs", out.top_logprobs, ("max_samples", "max_top"), FLOAT32)
        self._record_sample(logits, batch, out)

    def _record_sample(self, logits: Array, batch: SampleBatch, out: SampleOutput) -> None:
        vocab = logits.shape[1]
        scratch = np.empty((self._threads, -(-vocab // _PANEL) * _PANEL), np.float32)
        self._program.sample(
            address(logits), stride(logits), vocab, address(batch.rows), address(batch.history), stride(batch.history),
            address(batch.bias_ids), address(batch.bias_values), address(batch.masks), stride(batch.masks),
            address(scratch), stride(scratch), address(out.token_ids), address(out.logprobs), address(out.ranks),
            address(out.top_ids), stride(out.top_ids), address(out.top_logprobs), self._count(Size.SAMPLES),
        )  # fmt: skip
        self._keep(logits, batch, out, scratch)


def _own(weight: LinearWeight) -> NativeWeight:
    if not isinstance(weight, NativeWeight):
        raise TypeError(f"{type(weight).__name__} belongs to another backend; pack the weight with this one")
    return weight


def _own_cache(cache: KVCache, layer: int) -> NativeKVCache:
    if not isinstance(cache, NativeKVCache):
        raise TypeError(f"{type(cache).__name__} belongs to another backend; make the cache with this one")
    if not 0 <= layer < cache.shape.num_layers:
        raise ValueError(f"layer {layer} is not one of the cache's {cache.shape.num_layers}")
    return cache


class NativeBackend:
    """The C++ kernels with a thread pool of their own.

    threads: default as ``cpus.default_threads``. isa: default the environment's OCTAVO_ISA, else the best this machine runs.
    """

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        try:
            self._kernels = _native.select_kernels(isa or os.environ.get("OCTAVO_ISA", ""))
        except ValueError as error:
            raise ConfigError(f"OCTAVO_ISA: {error}") from None
        self._pool = _native.Pool(threads or default_threads())
        self._arena = Arena()

    @property
    def name(self) -> str:
        return f"native ({self.isa}, {self.threads} thread{'s' if self.threads > 1 else ''})"

    @property
    def isa(self) -> str:
        return self._kernels.name

    @property
    def threads(self) -> int:
        return self._pool.num_threads

    def pack(self, sources: Sequence[TensorSource], dtype: str, biases: Sequence[TensorSource] = ()) -> NativeWeight:
        in_features = sources[0].shape[1]
        if any(source.shape[1] != in_features for source in sources):
            raise ValueError(f"cannot stack matrices of different in_features: {[source.shape for source in sources]}")
        if biases and [b.shape[0] for b in biases] != [s.shape[0] for s in sources]:
            raise ValueError(f"biases {[b.shape for b in biases]} do not match the matrices {[s.shape for s in sources]}")
        is_bf16 = DTYPES[dtype] == BFLOAT16
        out_features = sum(source.shape[0] for source in sources)
        columns = -(-in_features // 2) * 2 if is_bf16 else in_features
        data = self._arena.take(-(-out_features // _PANEL) * _PANEL * columns * DTYPES[dtype].itemsize)
        described = [_describe(source) for source in sources]
        _native.pack(self._kernels, self._pool, described, address(data), in_features, is_bf16)
        bias = np.concatenate([self.vector(b) for b in biases]) if biases else None
        matrix = _native.PackedMatrix(address(data), address(bias), out_features, in_features, is_bf16)
        return NativeWeight(matrix, DTYPES[dtype], out_features, in_features, data, bias)

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
        return NativeProgram(self._kernels, self._pool, sizes)


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
