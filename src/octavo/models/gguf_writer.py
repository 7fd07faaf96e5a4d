"""The head of a GGUF file, written: as much of the format as the cache of quantised weights needs. ``gguf.py`` draws and reads it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

from octavo.kernels.dequantize import num_bytes
from octavo.models.gguf import FORMAT_NAMES

ALIGNMENT = 32
_VERSION, _UINT32, _STRING, _ARRAY = 3, 4, 8, 9
_FORMAT_NUMBERS = {name: number for number, name in FORMAT_NAMES.items()}

TensorInfo = tuple[str, tuple[int, int], str]
"""Name, shape (rows, columns) and format."""


def gguf_header(metadata: Mapping[str, str | Sequence[int]], tensors: Iterable[TensorInfo]) -> bytes:
    """All that comes before the tensors' data, which follow in this order, each padded to ``ALIGNMENT`` bytes.

    Numbers are stored as unsigned 32-bit arrays.
    """
    infos = list(tensors)
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(infos), len(metadata))]
    parts += [_text(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for name, (rows, columns), format in infos:
        parts += [_text(name), struct.pack("<IQQIQ", 2, columns, rows, _FORMAT_NUMBERS[format], offset)]
        offset += padded(num_bytes(format, rows * columns))
    header = b"".join(parts)
    return header.ljust(padded(len(header)), b"\0")


def padded(length: int) -> int:
    """``length`` rounded up to the alignment."""
    return length + -length % ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: str | Sequence[int]) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    return struct.pack(f"<IIQ{len(value)}I", _ARRAY, _UINT32, len(value), *value)
