"""``linear`` against exact sums in float64, and against itself: a row's bits never depend on the other rows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo.kernels.ops import Array, Size, TensorSource
from tests.helpers.isas import isas, native, needs_native
from tests.helpers.products import multiply

pytestmark = needs_native

NUMPY_DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
SHAPES = [(1, 1), (16, 2), (15, 3), (17, 64), (33, 31), (48, 128), (49, 257), (130, 96)]
every_isa = pytest.mark.parametrize("isa", isas())
every_dtype = pytest.mark.parametrize("dtype", NUMPY_DTYPES)


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(NUMPY_DTYPES[dtype])


def source(values: Array, name: str = "w") -> TensorSource:
    data = np.ascontiguousarray(values, np.float32)
    return TensorSource(name, data.shape, "F32", data.reshape(-1).view(np.uint8))


@every_isa
@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_within_the_bound_of_a_sum(isa: str, dtype: str, shape: tuple[int, int]) -> None:
    """Every order of n products and additions errs by at most gamma(n + 1) times the sum of magnitudes (Higham 2002, 3.1)."""
    w, x, bias = numbers(shape, dtype, 1), numbers((11, shape[1]), dtype, 2), numbers((shape[0],), "float32", 3)
    weight = native(isa).pack([source(w.astype(np.float32))], dtype, [source(bias)])
    found = multiply(native(isa), x, weight)
    exact_w, exact_x = w.astype(np.float64), x.astype(np.float64)
    exact = exact_x @ exact_w.T + bias
    magnitude = np.abs(exact_x) @ np.abs(exact_w).T + np.abs(bias)
    n = shape[1] + 2
    gamma = n * 2.0**-24 / (1 - n * 2.0**-24)
    assert np.all(np.abs(found - exact) <= 2 * gamma * magnitude)


@every_isa
@every_dtype
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_rows_do_not_depend_on_how_many_there_are(isa: str, dtype: str, threads: int) -> None:
    backend, x = native(isa, threads), numbers((70, 65), dtype, 4)
    weight = backend.pack([source(numbers((83, 65), "float32", 5))], dtype)
    alone = np.concatenate([multiply(native(isa, 1), x[i : i + 1], weight) for i in range(70)])
    for n in range(1, 71):
        assert np.array_equal(multiply(backend, x[:n], weight), alone[:n]), n


@every_isa
@every_dtype
def test_many_rows_and_panels(isa: str, dtype: str) -> None:
    """More than one group of rows, and units of many panels."""
    backend, x = native(isa, 3), numbers((201, 40), dtype, 6)
    weight = backend.pack([source(numbers((2000, 40), "float32", 7))], dtype)
    found = multiply(backend, x, weight)
    for i in (0, 63, 64, 199, 200):
        assert np.array_equal(found[i], multiply(native(isa, 1), x[i : i + 1], weight)[0])


@every_isa
@every_dtype
def test_strided_rows_and_untouched_surroundings(isa: str, dtype: str) -> None:
    backend, full = native(isa), numbers((9, 50), dtype, 8)
    x = full[:, 7:40]
    weight = backend.pack([source(numbers((21, 33), "float32", 9))], dtype)
    wide = np.full((9, 40), -1, np.float32)
    sizes = np.array([5, 0, 7, 0], np.int32)
    program = backend.program(sizes)
    program.linear(x, weight, wide[:, 3:24], Size.SAMPLES)
    program.run()
    assert np.array_equal(wide[:7, 3:24], multiply(backend, np.ascontiguousarray(x), weight)[:7])
    assert np.all(wide[7:] == -1) and np.all(wide[:, :3] == -1) and np.all(wide[:, 24:] == -1)


@every_isa
@every_dtype
@pytest.mark.parametrize("columns", [6, 7])
def test_nothing_beyond_a_row_is_read(isa: str, dtype: str, columns: int) -> None:
    """NaN right after the last element of each row leaves no trace, and a NaN row leaves none in the others."""
    full = numbers((20, columns + 1), dtype, 10)
    full[:, columns] = np.nan
    weight = native(isa).pack([source(numbers((5, columns), "float32", 11))], dtype)
    clean = multiply(native(isa), np.ascontiguousarray(full[:, :columns]), weight)
    assert np.array_equal(multiply(native(isa), full[:, :columns], weight), clean)
    full[3] = np.nan
    found = multiply(native(isa), full[:, :columns], weight)
    assert np.all(np.isnan(found[3])) and np.array_equal(np.delete(found, 3, 0), np.delete(clean, 3, 0))


@every_isa
def test_no_rows(isa: str) -> None:
    weight = native(isa).pack([source(numbers((5, 4), "float32", 12))], "float32")
    out = np.full((2, 5), 7, np.float32)
    program = native(isa).program(np.zeros(len(Size), np.int32))
    program.linear(np.zeros((2, 4), np.float32), weight, out)
    program.run()
    assert np.all(out == 7)
