"""Recorded programs: what is refused when recording, and that a step replays with new sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo.kernels.ops import Array, AttentionBatch, Backend, KVShape, Program, Size, TensorSource
from octavo.kernels.reference import ReferenceBackend
from tests.helpers.isas import isas, native, needs_native

pytestmark = needs_native

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, MAX_ROWS = 48, 4, 2, 12, 20, 50, 9


def f32(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def i32(*shape: int) -> Array:
    return np.zeros(shape, np.int32)


def source(rng: np.random.Generator, *shape: int) -> TensorSource:
    data = rng.standard_normal(shape).astype(np.float32) * np.float32(shape[-1] ** -0.5)
    return TensorSource("w", shape, "F32", data.reshape(-1).view(np.uint8))


def sizes_of(rows: int, requests: int = 1, samples: int = 0) -> Array:
    return np.array([rows, requests, samples, 0], np.int32)


class Layer:
    """One layer of a decoder and its head, recorded on a backend."""

    def __init__(self, backend: Backend, dtype: str) -> None:
        rng = np.random.default_rng(0)
        self.sizes = sizes_of(0)
        self.token_ids, self.sampled = i32(MAX_ROWS), i32(MAX_ROWS)
        self.batch = AttentionBatch(i32(4), np.arange(3, dtype=np.int32), i32(3, 4), i32(MAX_ROWS), i32(MAX_ROWS))
        self.logits = backend.empty((MAX_ROWS, VOCAB), "float32")
        self.cache = backend.kv_cache(KVShape(1, 12, 4, KV_HEADS, HEAD_DIM, dtype))
        self.cache.fill(range(12), float("nan"))
        self.program = backend.program(self.sizes)
        self._record(backend, dtype, rng)

    def _record(self, backend: Backend, dtype: str, rng: np.random.Generator) -> None:
        def rows(size: int, dtype: str = "float32") -> Array:
            return backend.empty((MAX_ROWS, size), dtype)

        p, norm = self.program, np.ones(HIDDEN, np.float32)
        columns = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        x, delta, normed, qkv, out = rows(HIDDEN), rows(HIDDEN), rows(HIDDEN, dtype), rows(columns), rows(HEADS * HEAD_DIM, dtype)
        angle = np.outer(np.arange(16), np.arange(1, 7)).astype(np.float32)
        format = dtype.replace("float64", "float32")
        table = backend.pack([source(rng, VOCAB, HIDDEN)], format)
        p.embed(self.token_ids, table, x)
        p.rms_norm(x, norm, normed, 1e-5)
        p.linear(normed, backend.pack([source(rng, columns, HIDDEN)], format), qkv)
        k_end = (HEADS + KV_HEADS) * HEAD_DIM
        p.rotary(qkv[:, :k_end], self.batch.positions, np.cos(angle), np.sin(angle), HEADS + KV_HEADS)
        p.write_kv(qkv[:, HEADS * HEAD_DIM : k_end], qkv[:, k_end:], self.batch.slots, self.cache, 0)
        p.paged_attention(qkv[:, : HEADS * HEAD_DIM], self.batch, self.cache, 0, out, HEAD_DIM**-0.5)
        p.linear(out, backend.pack([source(rng, HIDDEN, HEADS * HEAD_DIM)], format), delta)
        p.add_rms_norm(delta, x, norm, normed, 1e-5)
        gate_up, activated = rows(2 * FFN), rows(FFN, dtype)
        p.linear(normed, backend.pack([source(rng, 2 * FFN, HIDDEN)], format), gate_up)
        p.gated_activation(gate_up, activated, "silu")
        p.linear(activated, backend.pack([source(rng, HIDDEN, FFN)], format), delta)
        last, last_normed = rows(HIDDEN), rows(HIDDEN, dtype)
        p.gather_rows(delta, self.sampled, last)
        p.rms_norm(last, norm, last_normed, 1e-5, Size.SAMPLES)
        p.linear(last_normed, table, self.logits, Size.SAMPLES)

    def step(self, chunks: list[tuple[int, int, int]], token_ids: list[int]) -> Array:
        """Run chunks (table row, first position, rows) of tokens and return the logits of each one's last row."""
        b, row = self.batch, 0
        for i, (table, first, count) in enumerate(chunks):
            b.table_rows[i], b.query_starts[i + 1] = table, row + count
            b.block_tables[table] = np.arange(4) * 3 + table
            positions = np.arange(first, first + count)
            b.positions[row : row + count] = positions
            b.slots[row : row + count] = b.block_tables[table][positions // 4] * 4 + positions % 4
            row += count
            self.sampled[i] = row - 1
        self.token_ids[:row] = token_ids
        self.sizes[:3] = row, len(chunks), len(chunks)
        self.program.run()
        return self.logits[: len(chunks)].copy()


@pytest.mark.parametrize("isa", isas())
def test_a_recorded_layer_follows_the_reference(isa: str) -> None:
    """Prefill of two requests, then both decode while a third begins. Nothing but the program keeps the arrays alive.

    The tolerance is 200 roundings of the largest logit.
    """
    ours, definition = Layer(native(isa, 2), "float32"), Layer(ReferenceBackend("float64"), "float64")
    gc.collect()
    steps = [([(0, 0, 5), (2, 0, 4)], list(range(9))), ([(0, 5, 1), (2, 4, 1), (1, 0, 7)], list(range(20, 29))), ([(1, 7, 1)], [3])]
    for chunks, token_ids in steps:
        found, expected = ours.step(chunks, token_ids), definition.step(chunks, token_ids)
        np.testing.assert_allclose(found, expected, rtol=0, atol=200 * 2.0**-24 * np.abs(expected).max())


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_thread_counts_and_company_leave_the_bits_alone(isa: str, dtype: str) -> None:
    together = Layer(native(isa, 3), dtype).step([(0, 0, 5), (2, 0, 4)], list(range(9)))
    assert np.array_equal(together[:1], Layer(native(isa, 1), dtype).step([(0, 0, 5)], list(range(5))))
    layer = Layer(native(isa, 2), dtype)
    layer.step([(1, 0, 3)], [5, 6, 7])
    assert np.array_equal(together[1:], layer.step([(1, 3, 1)], [8]))


def refusals(b: Any) -> dict[str, Callable[[Program], None]]:
    w = b.pack([source(np.random.default_rng(0), 5, 4)], "bfloat16")
    other = ReferenceBackend().pack([source(np.random.default_rng(0), 5, 4)], "bfloat16")
    x = np.zeros((3, 4), ml_dtypes.bfloat16)
    q = f32(3, 16)
    cache = b.kv_cache(KVShape(2, 3, 4, 2, 8, "float32"))
    batch = AttentionBatch(i32(2), i32(2), i32(2, 2), i32(3), i32(3))
    return {
        r"linear: x is float32 but must be bfloat16": lambda p: p.linear(f32(3, 4), w, f32(3, 5)),
        r"linear: x is \[3, 5\] but must be \[max_rows, in_features=4\]": lambda p: p.linear(np.zeros((3, 5), x.dtype), w, f32(3, 5)),
        r"linear: out is \[2, 5\] but must be \[max_rows=3, out_features=5\]": lambda p: p.linear(x, w, f32(2, 5)),
        r"linear: x has strides": lambda p: p.linear(np.zeros((4, 3), x.dtype).T, w, f32(3, 5)),
        r"belongs to another backend": lambda p: p.linear(x, other, f32(3, 5)),
        r"embed: token_ids is int64": lambda p: p.embed(np.zeros(3, np.int64), w, f32(3, 4)),
        r"rms_norm: weight is \[3\]": lambda p: p.rms_norm(f32(2, 4), f32(3), f32(2, 4), 1e-5),
        r"rotary: 3 heads in 8 columns": lambda p: p.rotary(f32(2, 8), i32(2), f32(9, 2), f32(9, 2), 3),
        r"write_kv: k is \[3, 15\]": lambda p: p.write_kv(f32(3, 15), f32(3, 16), i32(3), cache, 0),
        r"layer 2 is not one of the cache's 2": lambda p: p.write_kv(f32(3, 16), f32(3, 16), i32(3), cache, 2),
        r"query_starts is \[2\] but must be \[max_requests \+ 1=3\]": lambda p: p.paged_attention(q, batch, cache, 0, q, 1.0),
        r"gated_activation: 'relu' is not known; choose one of silu": lambda p: p.gated_activation(f32(1, 4), f32(1, 2), "relu"),
        r"gate_up is \[1, 5\] but must be \[max_rows=1, 2n=4\]": lambda p: p.gated_activation(f32(1, 5), f32(1, 2), "silu"),
    }  # fmt: skip


@pytest.mark.parametrize("number", range(13))
def test_misuse_is_refused_by_name(number: int) -> None:
    backend = native(isas()[0])
    message, record = list(refusals(backend).items())[number]
    with pytest.raises((ValueError, TypeError), match=message):
        record(backend.program(i32(len(Size))))


def test_sizes_must_be_the_contracts() -> None:
    with pytest.raises(ValueError, match=r"sizes is \[3\] but must be \[sizes=4\]"):
        native(isas()[0]).program(i32(3))


@pytest.mark.parametrize("isa", isas())
def test_layers_of_different_heads_share_a_batch_but_no_plan(isa: str) -> None:
    """Attention of 12 heads over 3 beside one of 2 over 2, in one program, against each in a program of its own."""
    shapes = ((12, 3), (2, 2))
    batch = AttentionBatch(np.array([0, 40], np.int32), i32(1), np.arange(10, dtype=np.int32)[None], np.arange(40, dtype=np.int32), i32(40))
    rng = np.random.default_rng(0)
    caches = [native(isa, 2).kv_cache(KVShape(1, 10, 4, kv_heads, 8, "float32")) for _, kv_heads in shapes]
    queries = [rng.standard_normal((40, heads * 8)).astype(np.float32) for heads, _ in shapes]
    for cache, (_, kv_heads) in zip(caches, shapes, strict=True):
        kv = rng.standard_normal((2, 40, kv_heads * 8)).astype(np.float32)
        writing = native(isa, 2).program(sizes_of(40))
        writing.write_kv(kv[0], kv[1], np.arange(40, dtype=np.int32), cache, 0)
        writing.run()

    def attended(layers: Sequence[int]) -> list[Array]:
        outs = [np.zeros_like(queries[layer]) for layer in layers]
        program = native(isa, 2).program(sizes_of(40))
        for layer, out in zip(layers, outs, strict=True):
            program.paged_attention(queries[layer], batch, caches[layer], 0, out, 0.3)
        program.run()
        return outs

    together = attended([0, 1]), attended([1, 0])[::-1]
    alone = [*attended([0]), *attended([1])]
    for found in together:
        assert all(np.array_equal(a, b) for a, b in zip(found, alone, strict=True))
