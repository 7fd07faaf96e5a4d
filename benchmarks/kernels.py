"""The kernels against the machine's ceilings and against torch: ``python benchmarks/kernels.py [linear] [attention] [blocks]``."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from common import THREADS, Limits, interleaved, ratio, show

from octavo.bench.attention import AttentionCase
from octavo.kernels.dequantize import FORMATS
from octavo.kernels.native import NativeBackend
from octavo.kernels.ops import Size, TensorSource
from octavo.planner.known_models import KNOWN_MODELS

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate+up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
LAYERS = 30
SPEC = KNOWN_MODELS["smollm2-135m"].spec
HEADS, KV_HEADS, HEAD_DIM = SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim


def random_matrix(format: str, shape: tuple[int, int], chance: np.random.Generator) -> TensorSource:
    """Normal float32 numbers, or random codes with float16 scales (and minima) of 2^-7."""
    if format == "F32":
        return TensorSource("w", shape, format, chance.normal(size=shape).astype(np.float32).reshape(-1).view(np.uint8))
    block, num_bytes = FORMATS[format]
    data = chance.integers(0, 256, (shape[0] * shape[1] // block, num_bytes), dtype=np.uint8)
    data[:, 0 : {"Q8_0": 2, "Q4_1": 4}[format]] = np.tile(np.array([2.0**-7], np.float16).view(np.uint8), {"Q8_0": 1, "Q4_1": 2}[format])
    return TensorSource("w", shape, format, data.reshape(-1))


class Products:
    """One product of every weight of SmolLM2-135M, recorded for some rows."""

    def __init__(self, backend: NativeBackend, format: str, packing: str) -> None:
        chance = np.random.default_rng(0)
        self._backend = backend
        shapes = [shape for name, shape in SHAPES.items() for _ in range(1 if name == "head" else LAYERS)]
        self._weights = [backend.pack([random_matrix(format, shape, chance)], packing) for shape in shapes]
        self.num_bytes = sum(w.nbytes for w in self._weights)
        self.num_weights = sum(w.out_features * w.in_features for w in self._weights)

    def record(self, rows: int) -> Callable[[], None]:
        chance, backend = np.random.default_rng(1), self._backend
        program = backend.program(np.full(len(Size), rows, np.int32))
        inputs = {size: backend.empty((rows, size), self._weights[0].input_dtype) for size in (576, 1536)}
        for x in inputs.values():
            x[:] = chance.normal(size=x.shape)
        for weight in self._weights:
            program.linear(inputs[weight.in_features], weight, backend.empty((rows, weight.out_features), "float32"))
        return program.run


def bench_linear(backend: NativeBackend, limits: Limits) -> None:
    """Read bandwidth bounds few rows, arithmetic many; quantised products are measured against the peak of int8."""
    kinds = {
        "bf16": ("F32", "bfloat16", "bf16_gflops"),
        "Q8_0": ("Q8_0", "quantised", "int8_gops"),
        "Q4_1": ("Q4_1", "quantised", "int8_gops"),
    }
    products = {name: Products(backend, format, packing) for name, (format, packing, _) in kinds.items()}
    rows = []
    for count in (1, 8, 64, 256):
        times, limit = interleaved([p.record(count) for p in products.values()]), limits.measure()
        for (name, p), seconds in zip(products.items(), times, strict=True):
            bandwidth, rate = p.num_bytes / seconds / 1e9, 2 * count * p.num_weights / seconds / 1e9
            rows.append([count, name, f"{1e3 * seconds:.2f}", f"{bandwidth:.1f}", ratio(bandwidth, limit.get("read_gbs")), f"{rate:.0f}",
                         ratio(rate, limit.get(kinds[name][2]))])  # fmt: skip
    columns = ["rows", "weights", "ms", "GB/s", "of read", "G(FL)OP/s", "of peak"]
    show("linear: every weight of SmolLM2-135M once", columns, rows)


def attention(
    backend: NativeBackend, block_size: int, num_requests: int, context: int, queries: int, dtype: str = "bfloat16"
) -> AttentionCase:
    return AttentionCase(backend, SPEC, dtype, block_size, num_requests, context, queries)


def torch_attention(num_requests: int, context: int, queries: int) -> Callable[[], object]:
    """scaled_dot_product_attention over the same amount of data, contiguous."""
    import torch

    torch.set_num_threads(THREADS)
    q = torch.randn(num_requests, HEADS, queries, HEAD_DIM, dtype=torch.bfloat16)
    k, v = (torch.randn(num_requests, KV_HEADS, context, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))
    causal = queries > 1
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def bench_attention(backend: NativeBackend, limits: Limits) -> None:
    """Decode by bytes of keys and values, prefill by arithmetic; beside int8 KV, one huge block per request, and torch."""
    limit = limits.measure()
    rows = []
    decode = [(n, context, 1) for n in (1, 8, 64) for context in (128, 1024, 8192)]
    for num, context, queries in [*decode, (64, 4096, 1), (1, 512, 512), (1, 2048, 2048)]:
        case, whole = attention(backend, 16, num, context, queries), attention(backend, 256, num, context, queries)
        int8 = attention(backend, 16, num, context, queries, "int8")
        paged, huge, codes = interleaved([case.run, whole.run, int8.run], 9)
        [torch] = interleaved([torch_attention(num, context, queries)], 3)  # apart: its threads spin on after their work
        num_bytes = num * context * KV_HEADS * HEAD_DIM * 2 * 2
        pairs = num * (context if queries == 1 else context * (context + 1) // 2)
        flops = 4 * pairs * HEADS * HEAD_DIM / paged / 1e9
        name = f"decode {num} x {context}" if queries == 1 else f"prefill {context}"
        rows.append([name, f"{1e6 * paged:.0f}", f"{num_bytes / paged / 1e9:.1f}", ratio(num_bytes / paged / 1e9, limit.get("read_gbs")),
                     f"{flops:.0f}", ratio(flops, limit.get("bf16_gflops")), f"{1e6 * codes:.0f}", f"{paged / codes:.2f}x", f"{paged / huge - 1:+.1%}",
                     f"{torch / paged:.2f}x"])  # fmt: skip
    columns = [
        "case",
        "µs a layer",
        "GB/s",
        "of read",
        "GFLOP/s",
        "of bf16 peak",
        "int8 KV, µs",
        "faster",
        "over block 256",
        "torch SDPA takes",
    ]
    show("paged attention, SmolLM2's heads, bf16, block 16, scattered blocks", columns, rows)


def bench_blocks(backend: NativeBackend) -> None:
    """The same decode and prefill for every block size."""
    rows = []
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        decode, prefill = attention(backend, size, 32, 2048, 1), attention(backend, size, 1, 1024, 1024)
        seconds = interleaved([decode.run, prefill.run], 5)
        rows.append([size, *(f"{1e6 * s:.0f}" for s in seconds)])
    show("block sizes", ["block size", "decode 32 x 2048, µs", "prefill 1024, µs"], rows)


def main(which: set[str]) -> None:
    backend, limits = NativeBackend(threads=THREADS), Limits()
    print(backend.name, limits.measure())
    if "linear" in which:
        bench_linear(backend, limits)
    if "attention" in which:
        bench_attention(backend, limits)
    if "blocks" in which:
        bench_blocks(backend)


if __name__ == "__main__":
    main(set(sys.argv[1:]) or {"linear", "attention", "blocks"})
