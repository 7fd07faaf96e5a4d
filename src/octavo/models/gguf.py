"""A reader of GGUF files (the format of ggml and llama.cpp): metadata and tensors, mapped, without a copy.

    magic "GGUF" | version u32 | number of tensors u64 | number of metadata pairs u64
    pairs:    key (string) | type u32 | value                    string: length u64 | UTF-8 bytes
    tensors:  name (string) | dimensions u32 | each u64, innermost first | format u32 | offset u64
    padding to the alignment | tensor data

Every length and offset is checked against the file before it is believed: a damaged or hostile file raises
``ModelLoadError`` and nothing else. Values are decoded when they are asked for; opening only walks over them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ModelLoadError
from octavo.kernels.dequantize import FORMATS, num_bytes
from octavo.kernels.ops import TensorSource
from octavo.models.mapped import MappedFile

_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
FORMAT_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
_MAX_DIMENSIONS = 4
_SMALLEST_PAIR = 8 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8

_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as in NumPy."""
    format: str
    start: int
    """Offset of its first byte in the file."""
    num_bytes: int


class GGUFFile:
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its header; raises ``ModelLoadError`` saying what is wrong with it."""
        self.path = path
        self._file = MappedFile(path)
        header = _Header(self._file)
        self.metadata = GGUFMetadata(header, header.read_pairs())
        self.tensors = header.read_tensors(self.metadata)

    def source(self, name: str) -> TensorSource:
        """The tensor called ``name``, as mapped bytes; ``KeyError`` if there is none."""
        tensor = self.tensors[name]
        if tensor.format not in FORMATS:
            raise ModelLoadError(
                f"{self.path}: tensor {name} has format {tensor.format}, which is not supported; supported are {', '.join(FORMATS)}"
            )
        return TensorSource(name, tensor.shape, tensor.format, self._file.view(tensor.start, tensor.num_bytes))

    def release(self, source: TensorSource) -> None:
        """Give back the memory of a tensor's file pages."""
        self._file.release(source.data)


class GGUFMetadata(Mapping[str, Any]):
    """The metadata pairs, decoded at first access: numbers, text, lists of text, NumPy arrays of numbers."""

    def __init__(self, header: _Header, places: dict[str, tuple[int, int, int]]) -> None:
        self._header = header
        self._places = places
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            self._values[key] = self._header.value(key, *self._places[key])
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places


class _Header:
    """A cursor over the header; ``pos`` is the next byte."""

    def __init__(self, file: MappedFile) -> None:
        self.file, self.data, self.size, self.pos = file, file.map, file.size, 0
        if self.size < 24 or self.data[:4] != b"GGUF":
            raise self.error("it does not begin as a GGUF file does")
        (version,) = _u32(self.data, 4)
        if version not in (2, 3):
            order = "is big-endian" if version and not version & 0xFFFF else f"has version {version}"
            raise self.error(f"it {order}; little-endian GGUF of version 2 or 3 is supported")
        self.num_tensors, self.num_pairs = struct.unpack_from("<QQ", self.data, 8)
        self.pos = 24

    def error(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.file.path} is not a usable GGUF file: {problem}. Fetch it again if it was cut short.")

    def advance(self, length: int, what: str) -> int:
        """Step over ``length`` bytes and return where they begin."""
        start = self.pos
        if length > self.size - start:
            raise self.error(f"{what} needs {length} bytes at offset {start}, past the end of the file at {self.size}")
        self.pos = start + length
        return start

    def check_count(self, count: int, smallest: int, what: str) -> None:
        if count > (self.size - self.pos) // smallest:
            raise self.error(f"{count} {what} cannot fit in the {self.size - self.pos} bytes that are left")

    def u32(self, what: str) -> int:
        return int(_u32(self.data, self.advance(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_u64(self.data, self.advance(8, what))[0])

    def string(self, what: str) -> str:
        length = self.u64(what)
        return self.text(self.advance(length, what), length, what)

    def text(self, start: int, length: int, what: str) -> str:
        try:
            return str(self.data[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} at offset {start} is not UTF-8") from error

    def read_pairs(self) -> dict[str, tuple[int, int, int]]:
        """Step over the metadata and return key -> (type, offset of the value, its end)."""
        self.check_count(self.num_pairs, _SMALLEST_PAIR, "metadata pairs")
        places: dict[str, tuple[int, int, int]] = {}
        for _ in range(self.num_pairs):
            key = self.string("a metadata key")
            kind = self.u32(key)
            if key in places:
                raise self.error(f"the metadata key {key!r} occurs twice")
            start = self.pos
            self.skip(key, kind)
            places[key] = (kind, start, self.pos)
        return places

    def skip(self, key: str, kind: int) -> None:
        if kind in _SCALARS:
            self.advance(np.dtype(_SCALARS[kind]).itemsize, key)
        elif kind == _STRING:
            self.advance(self.u64(key), key)
        elif kind == _ARRAY:
            self.skip_array(key, self.u32(key), self.u64(key))
        else:
            raise self.error(f"{key} has the unknown type {kind}")

    def skip_array(self, key: str, kind: int, count: int) -> None:
        if kind in _SCALARS:
            self.advance(count * np.dtype(_SCALARS[kind]).itemsize, key)
        elif kind == _STRING:
            self.check_count(count, 8, f"strings of {key}")
            self.skip_strings(key, count)
        else:
            raise self.error(f"{key} is an array of type {kind}; arrays of numbers or strings are supported")

    def skip_strings(self, key: str, count: int) -> None:
        data, pos = self.data, self.pos
        try:  # a vocabulary has 100,000 strings, so the bounds are left to unpack_from and to one test at the end
            for _ in range(count):
                pos += 8 + _u64(data, pos)[0]
        except (struct.error, OverflowError) as error:
            raise self.error(f"the strings of {key} run past the end of the file") from error
        self.advance(pos - self.pos, key)

    def value(self, key: str, kind: int, start: int, end: int) -> Any:
        """Decode a value that ``read_pairs`` has stepped over, so its bounds are known to be good."""
        if kind in _SCALARS:
            return np.frombuffer(self.data, _SCALARS[kind], 1, start)[0].item()
        if kind == _STRING:
            return self.text(start + 8, end - start - 8, key)
        (element,), (count,) = _u32(self.data, start), _u64(self.data, start + 4)
        if element == _STRING:
            return self.strings(key, count, self.data[start + 12 : end])
        return np.frombuffer(self.data, _SCALARS[element], count, start + 12)

    def strings(self, key: str, count: int, section: bytes) -> list[str]:
        pos, found = 0, []
        try:
            for _ in range(count):
                end = pos + 8 + _u64(section, pos)[0]
                found.append(section[pos + 8 : end].decode("utf-8"))
                pos = end
        except UnicodeDecodeError as error:
            raise self.error(f"string {len(found)} of {key} is not UTF-8") from error
        return found

    def read_tensors(self, metadata: Mapping[str, Any]) -> dict[str, GGUFTensor]:
        self.check_count(self.num_tensors, _SMALLEST_TENSOR, "tensors")
        infos = [self.tensor_info() for _ in range(self.num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise self.error(f"general.alignment must be a positive multiple of 8, not {alignment!r}")
        data_start = self.pos + -self.pos % alignment
        tensors = {info[0]: self.place(data_start, alignment, *info) for info in infos}
        if len(tensors) != len(infos):
            raise self.error("two tensors have the same name")
        return tensors

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string("a tensor's name")
        rank = self.u32(name)
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise self.error(f"tensor {name} has {rank} dimensions; 1 to {_MAX_DIMENSIONS} are legal")
        shape = tuple(self.u64(name) for _ in range(rank))[::-1]
        return name, shape, self.u32(name), self.u64(name)

    def place(self, data_start: int, alignment: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        format = FORMAT_NAMES.get(kind, f"number {kind}")
        if format not in FORMATS:  # refused when it is asked for, so that an unused tensor does no harm
            return GGUFTensor(name, shape, format, data_start, 0)
        if shape[-1] % FORMATS[format][0] or 0 in shape:
            raise self.error(f"tensor {name} of shape {shape} is not made of whole {format} blocks of {FORMATS[format][0]}")
        length = num_bytes(format, math.prod(shape))
        if offset % alignment or data_start + offset + length > self.size:
            raise self.error(f"tensor {name} ({length} bytes at offset {data_start + offset}) does not lie inside the {self.size} bytes")
        return GGUFTensor(name, shape, format, data_start + offset, length)
