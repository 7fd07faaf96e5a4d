"""Quantised weights on disk, so that only the first start pays for making them.

A file per model and formats, in GGUF: the blocks under the tensors' canonical names, rows in logical order. It says what it was made
from (path, size and time of change of each file, the quantisers' version) and the CRC-32 of each tensor. A file that says something
else, or does not hold what it says, is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from octavo.errors import ModelLoadError
from octavo.kernels.ops import TensorSource
from octavo.kernels.quantize import VERSION
from octavo.models.gguf import GGUFFile
from octavo.models.gguf_writer import TensorInfo, gguf_header, padded
from octavo.user_cache import cache_directory

_SOURCE, _SUMS = "octavo.source", "octavo.crc32"


def cache_size() -> int:
    """Bytes of all quantised weights in the cache."""
    try:
        return sum(path.stat().st_size for path in cache_directory().glob("*.gguf"))
    except OSError:
        return 0


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One file of the cache, there or not."""

    path: Path
    source: str
    """What a good file says it was made from."""
    tensors: tuple[TensorInfo, ...]
    """What it holds, in this order."""

    @staticmethod
    def of(checkpoint: Path, tensors: Sequence[TensorInfo]) -> CacheEntry:
        """The place for these matrices of a checkpoint. Raises ``OSError``."""
        files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.glob("*.safetensors"))
        real = [file.resolve(strict=True) for file in files]
        identity = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in real]
        place = hashlib.sha256("\0".join(map(str, real)).encode()).hexdigest()[:16]
        name = "-".join([checkpoint.stem, *sorted({format for *_, format in tensors}), place])
        return CacheEntry(cache_directory() / f"{name}.gguf", json.dumps([VERSION, identity]), tuple(tensors))

    def open(self) -> GGUFFile | None:
        """The file, mapped, with every byte checked; None where there is none, or one that is not to be trusted."""
        try:
            file = GGUFFile(self.path)
            if file.metadata.get(_SOURCE) != self.source or list(file.tensors) != [name for name, *_ in self.tensors]:
                return None
            head = self._head(_sums(file))
            with self.path.open("rb") as stream:
                return file if stream.read(len(head)) == head else None
        except (ModelLoadError, OSError):
            return None

    def write(self, tensors: Iterable[TensorSource]) -> None:
        """Put the tensors there; other processes see all of them or nothing. Raises ``OSError``."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(".tmp", self.path.stem, self.path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                self._write(file, tensors)
            os.replace(temporary, self.path)
        except BaseException:
            os.unlink(temporary)
            raise

    def _head(self, sums: Sequence[int]) -> bytes:
        return gguf_header({_SOURCE: self.source, _SUMS: sums}, self.tensors)

    def _write(self, file: BinaryIO, tensors: Iterable[TensorSource]) -> None:
        """The head goes first and again at the end, when the sums are known."""
        file.write(self._head([0] * len(self.tensors)))
        sums = []
        for tensor in tensors:
            file.write(tensor.data.data)
            file.write(bytes(padded(tensor.data.size) - tensor.data.size))
            sums.append(zlib.crc32(tensor.data.data))
        file.seek(0)
        file.write(self._head(sums))


def _sums(file: GGUFFile) -> list[int]:
    with ThreadPoolExecutor() as threads:  # zlib gives the interpreter up meanwhile
        return list(threads.map(lambda name: zlib.crc32(file.source(name).data.data), file.tensors))
