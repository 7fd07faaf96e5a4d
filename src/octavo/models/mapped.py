"""A checkpoint file mapped into memory, read-only: bytes by offset, views without a copy, pages given back."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError


class MappedFile:
    """The bytes of one file. Views handed out by ``view`` keep the map alive."""

    def __init__(self, path: Path) -> None:
        """Map ``path``; raises ``ModelLoadError`` if it cannot be opened or is empty."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        self.size = len(self.map)
        self._bytes = np.frombuffer(self.map, np.uint8)

    def view(self, start: int, length: int) -> NDArray[np.uint8]:
        """``length`` bytes from ``start`` on, as a read-only uint8 array; the range must lie inside the file."""
        assert start >= 0 and length >= 0 and start + length <= self.size
        return self._bytes[start : start + length]

    def release(self, view: NDArray[np.uint8]) -> None:
        """Give the pages under ``view`` back to the system; they are read from the file again if touched.

        Pages shared with a neighbouring tensor go too, which costs it one read at most.
        """
        if not view.size or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = view.ctypes.data - self._bytes.ctypes.data
        assert start >= 0 and start + view.size <= self.size
        first = start - start % mmap.PAGESIZE
        self.map.madvise(mmap.MADV_DONTNEED, first, start + view.size - first)
