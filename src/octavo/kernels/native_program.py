"""Ops recorded for native code: arrays are checked by named sizes, stored as addresses, and kept alive."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.kernels.native_storage import own_cache, own_weight
from octavo.kernels.ops import (
    ACTIVATIONS,
    MAX_TOP,
    SAMPLE_ROW,
    Array,
    AttentionBatch,
    Int32,
    KVCache,
    LinearWeight,
    SampleBatch,
    SampleOutput,
    Size,
    StepColumns,
)
from octavo.kernels.shapes import BFLOAT16, DTYPES, FLOAT32, INT8, INT32, UINT32, ShapeChecker, address, stride

_VECTOR = 16

assert _native.sample_row_bytes() == SAMPLE_ROW.itemsize, "SampleRow in csrc/kernels.h must mirror SAMPLE_ROW in ops.py"


class NativeProgram:
    """A recorded step. Each op checks its arrays once, here; ``run`` is one native call that releases the GIL."""

    def __init__(self, kernels: _native.Kernels, pool: _native.Pool, sizes: Int32, shared_prefix: bool = True) -> None:
        ShapeChecker("program", sizes=len(Size))("sizes", sizes, ("sizes",), INT32)
        self._program = _native.Program(kernels, pool, shared_prefix)
        self._threads = pool.num_threads
        self._sizes = sizes
        self._alive: list[object] = [sizes]
        self._batches: dict[int, _native.AttentionBatch] = {}

    def run(self) -> None:
        self._program.run()

    @property
    def num_shared_rows(self) -> int:
        """Rows of attention, per KV head, that read keys together with other requests' rows in the last run."""
        return self._program.num_shared_rows

    @property
    def blocks_ahead(self) -> list[int]:
        """The blocks that the last run listed for products to ask for before attention reads them."""
        return self._program.blocks_ahead

    def profile(self) -> dict[str, float]:
        """Run once; the seconds that each kind of op took in all."""
        return self._program.profile()

    def _count(self, size: Size) -> int:
        return address(self._sizes) + int(size) * self._sizes.itemsize

    def _keep(self, *objects: object) -> None:
        self._alive.extend(objects)

    def lay_out_rows(self, columns: StepColumns, batch: AttentionBatch, token_ids: Int32, history: Int32, block_size: int) -> None:
        check = ShapeChecker("lay_out_rows")
        native_columns = self._columns(check, columns, batch)
        check("slots", batch.slots, ("max_rows",), INT32)
        check("token_ids", token_ids, ("max_rows",), INT32)
        check("history", history, ("max_num_seqs", "max_model_len"), INT32)
        self._program.lay_out_rows(
            native_columns, address(token_ids), block_size, address(batch.block_tables), stride(batch.block_tables),
            address(history), stride(history), address(batch.query_starts), address(batch.positions), address(batch.slots),
        )  # fmt: skip
        self._keep(batch, token_ids, history)

    def lay_out_samples(
        self, columns: StepColumns, batch: AttentionBatch, params: NDArray[np.void], sampled_rows: Int32, rows: NDArray[np.void]
    ) -> None:
        check = ShapeChecker("lay_out_samples")
        native_columns = self._columns(check, columns, batch)
        check("params", params, ("max_num_seqs",), SAMPLE_ROW)
        check("sampled_rows", sampled_rows, ("max_samples",), INT32)
        check("rows", rows, ("max_samples",), SAMPLE_ROW)
        self._program.lay_out_samples(native_columns, address(batch.query_starts), address(params), address(sampled_rows), address(rows))
        self._keep(batch, params, sampled_rows, rows)

    def _columns(self, check: ShapeChecker, columns: StepColumns, batch: AttentionBatch) -> _native.StepColumns:
        _check_batch(check, batch)
        for name in ("num_computed", "num_scheduled", "num_samples", "num_drafts", "num_new_blocks"):
            check(name, getattr(columns, name), ("max_requests",), INT32)
        check("new_block_ids", columns.new_block_ids, ("capacity",), INT32)
        check("replaced", columns.replaced, ("max_requests",), INT8)
        self._keep(columns)
        return _native.StepColumns(
            address(batch.table_rows), address(columns.num_computed), address(columns.num_scheduled), address(columns.num_samples),
            address(columns.num_drafts), address(columns.num_new_blocks), address(columns.new_block_ids), address(columns.replaced), self._count(Size.REQUESTS),
        )  # fmt: skip

    def embed(self, token_ids: Int32, table: LinearWeight, out: Array) -> None:
        weight = own_weight(table)
        [part] = weight.parts
        check = ShapeChecker("embed", in_features=weight.in_features)
        check("out", out, ("max_rows", "in_features"), FLOAT32)
        check("token_ids", token_ids, ("max_rows",), INT32)
        self._program.embed(address(token_ids), part.matrix, address(out), stride(out), self._count(Size.ROWS))
        self._keep(token_ids, weight, out)

    def linear(self, x: Array, weight: LinearWeight, out: Array, count: Size = Size.ROWS) -> None:
        w = own_weight(weight)
        check = ShapeChecker("linear", in_features=w.in_features, out_features=w.out_features)
        check("x", x, ("max_rows", "in_features"), DTYPES[w.input_dtype])
        check("out", out, ("max_rows", "out_features"), FLOAT32)
        column = 0
        for part in w.parts:
            self._program.linear(address(x), stride(x), part.matrix, address(out[:, column:]), stride(out), self._count(count))
            column += part.out_features
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
        own = own_cache(cache, layer)
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
        own = own_cache(cache, layer)
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
        _check_batch(check, batch)
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
        own = own_cache(cache, 0)
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
        scratch = np.empty((self._threads, -(-vocab // _VECTOR) * _VECTOR), np.float32)
        self._program.sample(
            address(logits), stride(logits), vocab, address(batch.rows), address(batch.history), stride(batch.history),
            address(batch.bias_ids), address(batch.bias_values), address(batch.masks), stride(batch.masks),
            address(scratch), stride(scratch), address(out.token_ids), address(out.logprobs), address(out.ranks),
            address(out.top_ids), stride(out.top_ids), address(out.top_logprobs), self._count(Size.SAMPLES),
        )  # fmt: skip
        self._keep(logits, batch, out, scratch)


def _check_batch(check: ShapeChecker, batch: AttentionBatch) -> None:
    check("table_rows", batch.table_rows, ("max_requests",), INT32)
    check.sizes["max_requests + 1"] = check.sizes["max_requests"] + 1
    check("query_starts", batch.query_starts, ("max_requests + 1",), INT32)
    check("block_tables", batch.block_tables, ("max_num_seqs", "max_blocks_per_request"), INT32)
    check("positions", batch.positions, ("max_rows",), INT32)
