"""Arrays checked by named sizes before native code gets their addresses."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from octavo.kernels.ops import Array

FLOAT32: np.dtype[Any] = np.dtype(np.float32)
INT8: np.dtype[Any] = np.dtype(np.int8)
INT32: np.dtype[Any] = np.dtype(np.int32)
UINT32: np.dtype[Any] = np.dtype(np.uint32)
BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16}


def address(array: Array | None) -> int:
    """Where an array's first element lies; 0 for None."""
    return 0 if array is None else int(array.__array_interface__["data"][0])


def stride(array: Array) -> int:
    """Elements from one row to the next."""
    return int(array.strides[0]) // array.itemsize


class ShapeChecker:
    """The arrays of one op. A size named twice must be the same both times.

    >>> check = ShapeChecker("linear", into=4)
    >>> check("x", np.zeros((2, 4), np.float32), ("rows", "into"), FLOAT32)
    >>> check("out", np.zeros((3, 4), np.float32), ("rows", "into"), FLOAT32)
    Traceback (most recent call last):
    ValueError: linear: out is [3, 4] but must be [rows=2, into=4]
    """

    def __init__(self, op: str, **sizes: int) -> None:
        self._op = op
        self.sizes = sizes

    def __call__(self, name: str, array: Array, shape: tuple[str, ...], *dtypes: np.dtype[Any]) -> None:
        """Check an array; its rows may be strided, the elements of a row follow each other."""
        if array.dtype not in dtypes:
            raise TypeError(f"{self._op}: {name} is {array.dtype} but must be {' or '.join(map(str, dtypes))}")
        if not self._fits(array.shape, shape):
            wanted = ", ".join(f"{size}={self.sizes[size]}" if size in self.sizes else size for size in shape)
            raise ValueError(f"{self._op}: {name} is {list(array.shape)} but must be [{wanted}]")
        self.sizes.update(zip(shape, array.shape, strict=True))
        if not _has_contiguous_rows(array):
            raise ValueError(f"{self._op}: {name} has strides {array.strides}; elements of a row must follow each other")

    def _fits(self, actual: tuple[int, ...], shape: tuple[str, ...]) -> bool:
        return len(actual) == len(shape) and all(self.sizes.get(size, n) == n for size, n in zip(shape, actual, strict=True))


def _has_contiguous_rows(array: Array) -> bool:
    if array.size == 0 or array.flags.c_contiguous:
        return True
    inner = array[0] if array.ndim > 1 else array
    return bool(inner.flags.c_contiguous) and array.strides[0] % array.itemsize == 0
