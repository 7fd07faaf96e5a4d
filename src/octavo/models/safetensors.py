"""A reader of safetensors files: a length (u64), a JSON header of that length, then the tensors' bytes; mapped, no copy.

Our own because the ``safetensors`` package hands NumPy no bfloat16 and copies. Nothing but JSON is ever parsed, and
every range is checked against the file: a damaged file raises ``ModelLoadError`` and nothing else.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from octavo.errors import ModelLoadError
from octavo.kernels.dequantize import FORMATS, num_bytes
from octavo.kernels.ops import TensorSource
from octavo.models.mapped import MappedFile

_MAX_HEADER = 100_000_000
_FLOATS = ("F32", "F16", "BF16")


class SafetensorsFile:
    """An open safetensors file: ``shapes`` by tensor name, and ``source`` for the bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        self._data_start, self._entries = self._read_header()
        self.shapes = {name: tuple(entry["shape"]) for name, entry in self._entries.items()}

    def source(self, name: str) -> TensorSource:
        """The tensor called ``name``, as mapped bytes; ``KeyError`` if there is none."""
        entry = self._entries[name]
        if entry["dtype"] not in _FLOATS:
            raise self._error(f"tensor {name} has dtype {entry['dtype']}, which is not supported; supported are {', '.join(_FLOATS)}")
        start, end = entry["data_offsets"]
        data = self._file.view(self._data_start + start, end - start)
        return TensorSource(name, self.shapes[name], entry["dtype"], data)

    def release(self, source: TensorSource) -> None:
        """Give back the memory of a tensor's file pages."""
        self._file.release(source.data)

    def _error(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is not a usable safetensors file: {problem}")

    def _read_header(self) -> tuple[int, dict[str, dict[str, Any]]]:
        size, data = self._file.size, self._file.map
        length = int.from_bytes(data[:8], "little") if size >= 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise self._error(f"its header would be {length} bytes long, in a file of {size}")
        try:
            header = json.loads(data[8 : 8 + length])
        except (ValueError, RecursionError) as error:
            raise self._error(f"its header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._error("its header is not a JSON object")
        header.pop("__metadata__", None)
        for name, entry in header.items():
            self._check_entry(name, entry, size - 8 - length)
        return 8 + length, header

    def _check_entry(self, name: str, entry: Any, num_data_bytes: int) -> None:
        """Refuse an entry whose range, shape and dtype do not agree."""
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise self._error(f"tensor {name} lacks dtype, shape or data_offsets")
        shape, offsets, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
        for numbers in (shape, offsets):
            if not isinstance(numbers, list) or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in numbers):
                raise self._error(f"tensor {name} has shape {shape!r:.60} and data_offsets {offsets!r:.60}; both must list sizes")
        if len(offsets) != 2 or not offsets[0] <= offsets[1] <= num_data_bytes:
            raise self._error(f"tensor {name} does not lie inside the file: data_offsets {offsets!r:.60} of {num_data_bytes} bytes")
        if isinstance(dtype, str) and dtype in FORMATS and num_bytes(dtype, math.prod(shape)) != offsets[1] - offsets[0]:
            raise self._error(f"tensor {name} of shape {shape!r:.60} and dtype {dtype} does not fill its {offsets[1] - offsets[0]} bytes")
