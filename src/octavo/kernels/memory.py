"""Memory for weights, activations and the KV cache: aligned, in huge pages where the system has them, touched when written."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

LINE = 64
HUGE_PAGE = 2 << 20
_CHUNK = 32 << 20


def map_memory(size: int) -> Bytes:
    """Zeroed pages of their own, aligned to a huge page; they take no memory before they are written."""
    mapping = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared mappings get no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: nothing is lost but speed
            mapping.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(mapping, np.uint8)
    start = -array.__array_interface__["data"][0] % HUGE_PAGE
    return array[start : start + size]


class Arena:
    """Hands out pieces of large mappings, so that many small matrices share huge pages. A mapping lives as long as a piece of it."""

    def __init__(self) -> None:
        self._free: Bytes = np.empty(0, np.uint8)

    def take(self, size: int) -> Bytes:
        """``size`` bytes, not initialised, aligned to a cache line."""
        if size >= _CHUNK:
            return map_memory(size)
        if size > self._free.size:
            self._free = map_memory(_CHUNK)
        piece = self._free[:size]
        self._free = self._free[-(-size // LINE) * LINE :]
        return piece
