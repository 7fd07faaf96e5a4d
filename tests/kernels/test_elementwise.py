"""Native elementwise ops against their definition in float64, on every instruction set.

Tolerances are in units of U, the rounding error of float32, and of the quantities that are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo.kernels.ops import ACTIVATIONS, Backend, Program, Size, TensorSource
from octavo.kernels.reference import ReferenceBackend
from tests.helpers.isas import isas, native, needs_native

pytestmark = [needs_native, pytest.mark.parametrize("isa", isas())]

U = 2.0**-24
U_BF16 = 2.0**-8
SIZES = (1, 2, 15, 16, 17, 63, 64, 100, 576)
SENTINEL = 7.25  # what rows past the count must still hold
Record = Callable[[Program], None]


def sizes_of(rows: int, samples: int = 0) -> Any:
    sizes = np.zeros(len(Size), np.int32)
    sizes[Size.ROWS], sizes[Size.SAMPLES] = rows, samples
    return sizes


def run(backend: Backend, sizes: Any, record: Record) -> None:
    program = backend.program(sizes)
    record(program)
    program.run()


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Any:
    return (np.random.default_rng((seed, *shape)).standard_normal(shape) * scale).astype(np.float32)


def out_like(rows: int, size: int, dtype: str) -> Any:
    return np.full((rows, size), SENTINEL, np.float32 if dtype == "float32" else ml_dtypes.bfloat16)


def source(array: Any) -> TensorSource:
    return TensorSource("t", array.shape, "F32", np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint8))


def assert_rounds(found: Any, exact: Any, error: Any) -> None:
    """``found`` is within ``error`` of ``exact``, and half a unit in the last place more where it is bfloat16."""
    if found.dtype != np.float32:
        error = error + U_BF16 * (np.abs(exact) + error)
    assert np.all(np.abs(found.astype(np.float64) - exact) <= error + 1e-37)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1), (17, 5), (33, 64), (100, 577)])
def test_embed_is_exact(isa: str, dtype: str, shape: tuple[int, int]) -> None:
    backend, table = native(isa), normal(*shape)
    ids = np.array([0, shape[0] - 1, shape[0] // 2, *np.random.default_rng(0).integers(0, shape[0], 37)], np.int32)
    out = out_like(40, shape[1], "float32")
    run(backend, sizes_of(39), lambda p: p.embed(ids, backend.pack([source(table)], dtype), out))
    rounded = table.astype(ml_dtypes.bfloat16).astype(np.float32) if dtype == "bfloat16" else table
    assert np.array_equal(out[:39], rounded[ids[:39]])
    assert np.all(out[39] == SENTINEL)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm(isa: str, dtype: str, size: int) -> None:
    x, weight, out = normal(6, size, scale=3), normal(size, seed=1), out_like(6, size, dtype)
    run(native(isa), sizes_of(5), lambda p: p.rms_norm(x, weight, out, 1e-5))
    wide = x.astype(np.float64)[:5]
    exact = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + np.float64(np.float32(1e-5))) * weight
    # A lane adds size / 16 squares and 6 more fold the lanes; the root halves that; division, root and products add theirs.
    assert_rounds(out[:5], exact, ((size / 16 + 8) / 2 + 5) * U * np.abs(exact))
    assert np.all(out[5] == SENTINEL)


@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_adds_then_norms(isa: str, size: int) -> None:
    x, residual, weight = normal(5, size), normal(5, size, seed=1), normal(size, seed=2)
    expected, out, alone = residual + x, out_like(5, size, "float32"), out_like(5, size, "float32")
    expected[4] = residual[4]
    run(native(isa), sizes_of(4), lambda p: p.add_rms_norm(x, residual, weight, out, 1e-5))
    run(native(isa), sizes_of(4), lambda p: p.rms_norm(expected, weight, alone, 1e-5))
    assert np.array_equal(residual, expected)
    assert np.array_equal(out, alone)


@pytest.mark.parametrize(("heads", "head_dim", "half"), [(1, 2, 1), (3, 64, 32), (2, 40, 20), (9, 96, 16), (2, 128, 64), (3, 38, 17)])
def test_rotary_equals_the_definition(isa: str, heads: int, head_dim: int, half: int) -> None:
    cos, sin = np.cos(normal(50, half)), np.sin(normal(50, half))
    positions = np.random.default_rng(0).integers(0, 50, 7).astype(np.int32)
    width = heads * head_dim
    found, expected = normal(7, width + 10), normal(7, width + 10)
    run(native(isa), sizes_of(6), lambda p: p.rotary(found[:, 3 : 3 + width], positions, cos, sin, heads))
    run(ReferenceBackend(), sizes_of(6), lambda p: p.rotary(expected[:, 3 : 3 + width], positions, cos, sin, heads))
    assert np.array_equal(found, expected)  # two products and a sum, each rounded once: the same bits everywhere


def activated(x: Any, kind: str) -> Any:
    """The activation in float64, by formulas other than the kernels' own."""
    from math import erfc

    if kind == "silu":
        return 0.5 * x * (1 + np.tanh(x / 2))
    if kind == "gelu":
        return 0.5 * x * np.vectorize(erfc)(-x / np.sqrt(2))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 15, 17, 64, 1000])
def test_gated_activation(isa: str, kind: str, dtype: str, size: int) -> None:
    gate_up, out = normal(4, 2 * size, scale=4), out_like(4, size, dtype)
    gate_up[0, :size] = np.linspace(-120, 120, size)
    gate_up[1, :size] = np.linspace(-1.5, 1.5, size)
    run(native(isa), sizes_of(3), lambda p: p.gated_activation(gate_up, out, kind))
    gate, up = gate_up[:3, :size].astype(np.float64), gate_up[:3, size:].astype(np.float64)
    # The factor of x that is between 0 and 1 is off by at most 8 U (argument, exponential or erf, sum, quotient), x and the products round.
    assert_rounds(out[:3], activated(gate, kind) * up, 10 * U * np.abs(gate * up))
    assert np.all(out[3] == SENTINEL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_erf_is_accurate_near_zero(isa: str, dtype: str) -> None:
    """x Phi(x) around 0, where an absolute bound would hide a bad erf."""
    x = np.concatenate([np.linspace(-1.3, 1.3, 999), np.geomspace(1e-6, 6, 1000)]).astype(np.float32)
    gate_up, out = np.concatenate([x, np.ones_like(x)])[None], out_like(1, len(x), dtype)
    run(native(isa), sizes_of(1), lambda p: p.gated_activation(gate_up, out, "gelu"))
    exact = activated(x.astype(np.float64), "gelu")[None]
    assert_rounds(out, exact, 8 * U * np.abs(exact))


def test_gather_rows_counts_samples(isa: str) -> None:
    x, indices, out = normal(9, 100), np.array([8, 0, 3, 3, 1], np.int32), out_like(5, 33, "float32")
    run(native(isa), sizes_of(9, samples=4), lambda p: p.gather_rows(x[:, 5:38], indices, out))
    assert np.array_equal(out[:4], x[indices[:4], 5:38])
    assert np.all(out[4] == SENTINEL)


def test_bfloat16_is_rounded_to_nearest_even(isa: str) -> None:
    """The bfloat16 result is the float32 result, rounded as ml_dtypes does; also where the last bit ties."""
    x, weight = normal(3, 1000), np.ones(1000, np.float32)
    narrow, wide = out_like(3, 1000, "bfloat16"), out_like(3, 1000, "float32")
    x[0] = (np.arange(1000, dtype=np.uint32) * 0x8000 + 0x3F800000).view(np.float32)  # every second one is a tie
    x[0] /= np.sqrt(np.mean(x[0].astype(np.float64) ** 2))
    run(native(isa), sizes_of(3), lambda p: p.rms_norm(x, weight, narrow, 0.0))
    run(native(isa), sizes_of(3), lambda p: p.rms_norm(x, weight, wide, 0.0))
    assert np.array_equal(narrow.view(np.uint16), wide.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_rows_do_not_depend_on_each_other_or_on_threads(isa: str) -> None:
    """300 rows on two threads against each of them alone on one."""
    rows, size = 300, 150
    x, residual, weight = normal(rows, size), normal(rows, size, seed=1), normal(size, seed=2)
    gate_up, cos, sin = normal(rows, 2 * size), np.cos(normal(40, 25)), np.sin(normal(40, 25))
    positions = np.random.default_rng(0).integers(0, 40, rows).astype(np.int32)

    def step(first: int, last: int, threads: int) -> list[Any]:
        take = slice(first, last)
        outs = [out_like(last - first, size, dtype) for dtype in ("bfloat16", "float32")]
        turned, summed = x[take].copy(), residual[take].copy()

        def record(p: Program) -> None:
            p.add_rms_norm(x[take], summed, weight, outs[0], 1e-6)
            p.gated_activation(gate_up[take], outs[1], "gelu")
            p.rotary(turned, positions[take], cos, sin, 3)

        run(native(isa, threads), sizes_of(last - first), record)
        return [*outs, turned, summed]

    together = step(0, rows, threads=2)
    for row in range(0, rows, 7):
        for all_rows, alone in zip(together, step(row, row + 1, threads=1), strict=True):
            assert all_rows[row].tobytes() == alone[0].tobytes()
