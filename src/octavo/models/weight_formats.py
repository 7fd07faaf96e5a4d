"""Which format each matrix of a checkpoint runs in, and the memory that takes: decided from the header alone, before anything is loaded.

Knows no arrays, so that ``octavo plan`` and the engine's start give the same answer.

    float32, bfloat16      decoded, rounded to the dtype, and multiplied as floats
    Q4_0 ... IQ4_XS        blocks of codes with their scales and minima, multiplied as integers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from octavo.errors import ConfigError
from octavo.models.spec import DTYPE_BYTES, DecoderSpec

PANEL = 16
"""Outputs that the packed layout keeps together (csrc/packed.h); the last panel is filled up."""
CACHE_LINE = 64


class PackedForm(NamedTuple):
    """What csrc/packed.h makes of a quantised format."""

    code_bits: int
    """4, or 8 for every format with more."""
    group: int
    """Weights that share a scale."""
    minima: bool
    super_blocks: bool
    """Scales are float16 x int8, the float16 one for 256 weights; else one float16 each."""


PACKED_FORMS = {
    "Q4_0": PackedForm(4, 32, False, False), "Q4_1": PackedForm(4, 32, True, False),
    "Q5_0": PackedForm(8, 32, False, False), "Q5_1": PackedForm(8, 32, True, False), "Q8_0": PackedForm(8, 32, False, False),
    "Q2_K": PackedForm(4, 16, True, True), "Q3_K": PackedForm(4, 16, False, True), "Q4_K": PackedForm(4, 32, True, True),
    "Q5_K": PackedForm(8, 32, True, True), "Q6_K": PackedForm(8, 16, False, True),
    "IQ4_NL": PackedForm(4, 32, False, False), "IQ4_XS": PackedForm(4, 32, False, True),
}  # fmt: skip
"""Of every quantised format that can be kept."""

GROUP = 32
TABLES = ("embed", "head")
"""With int4 they get 8 bits: at 4 bits they alone cost several times what the layers do (docs/performance.md)."""
STACKS = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
"""Matrices of a layer that take the same input and are one product. Floats beside quantised ones are float32, as their input is."""


def packed_bytes(format: str, out_features: int, in_features: int) -> int:
    """Bytes of one packed matrix.

    >>> packed_bytes("bfloat16", 100, 64), packed_bytes("Q4_1", 16, 64), packed_bytes("Q6_K", 16, 256)
    (14336, 640, 4416)
    """
    panels = -(-out_features // PANEL)
    if format not in PACKED_FORMS:
        size = DTYPE_BYTES[format]
        return panels * PANEL * size * (in_features if size == 4 else -(-in_features // 2) * 2)
    form = PACKED_FORMS[format]
    scales = in_features // form.group + 2 * (in_features // 256) if form.super_blocks else 2 * (in_features // form.group)
    section = -(-scales * PANEL // CACHE_LINE) * CACHE_LINE
    return panels * (section * (1 + form.minima) + in_features * PANEL * form.code_bits // 8)


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The choice for one checkpoint."""

    dtype: str
    """float32 or bfloat16: of matrices that are not quantised, and of the KV cache by default."""
    sources: Mapping[str, str]
    """Canonical name of each matrix -> its format in the checkpoint"""
    formats: Mapping[str, str]
    """... -> the format it runs in."""
    nbytes: int
    """Of all matrices once packed; norms and biases are under a thousandth of it."""

    @property
    def to_quantize(self) -> dict[str, str]:
        """Matrices that are quantised anew -> format."""
        return {name: format for name, format in self.formats.items() if format in PACKED_FORMS and format != self.sources[name]}

    def describe(self) -> str:
        """For people: formats by the share of matrices they have, and how they came to be."""
        kept = [name for name, format in self.formats.items() if format in PACKED_FORMS and name not in self.to_quantize]
        parts = [
            (self.to_quantize, f"quantised from {_names(self.sources[name] for name in self.to_quantize)}"),
            (kept, "kept"),
            ([name for name, format in self.formats.items() if format not in PACKED_FORMS], self._origin_of_floats()),
        ]
        return ", ".join(f"{_names(self.formats[name] for name in names)} ({how})" for names, how in parts if names)

    def _origin_of_floats(self) -> str:
        return f"from {_names(self.sources[name] for name, format in self.formats.items() if format not in PACKED_FORMS)}"


def _names(formats: Iterable[str]) -> str:
    return " + ".join(name for name, _ in Counter(formats).most_common())


def choose_formats(spec: DecoderSpec, sources: Mapping[str, str], dtype: str, quantize: str | None) -> WeightFormats:
    """The format of each matrix for these settings (``config.ModelConfig``). ``sources``: tensor name -> format in the checkpoint.

    Raises ``ConfigError`` where quantised weights shall be kept and there are none.
    """
    shapes = spec.matrix_shapes()
    sources = {name: sources[name] for name in shapes}
    quantised = any(format in PACKED_FORMS for format in sources.values())
    if quantize == "native" and not quantised:
        raise ConfigError(
            f"quantize='native' keeps quantised weights as they are, but this model has none ({_names(sources.values())}); "
            f"quantize='int8' or 'int4' makes them"
        )
    quantize = quantize or ("native" if dtype == "auto" and quantised else None)
    plain = "bfloat16" if dtype == "auto" else dtype
    formats = {name: _format(quantize, name, sources[name], shape[1], plain) for name, shape in shapes.items()}
    stacks = _stacks(shapes)
    for stack in stacks:
        if any(formats[name] in PACKED_FORMS for name in stack):
            formats |= {name: "float32" for name in stack if formats[name] not in PACKED_FORMS}
    return WeightFormats(plain, sources, formats, sum(_stack_bytes(stack, formats, shapes) for stack in stacks))


def _stack_bytes(stack: Sequence[str], formats: Mapping[str, str], shapes: Mapping[str, tuple[int, int]]) -> int:
    runs = [(format, [shapes[name] for name in names]) for format, names in groupby(stack, formats.__getitem__)]
    return sum(packed_bytes(format, sum(rows for rows, _ in run), run[0][1]) for format, run in runs)


def _stacks(names: Iterable[str]) -> list[list[str]]:
    """Matrices that are packed as one, in order; neighbours of one format share panels."""
    stacks: dict[str, list[str]] = {}
    for name in names:
        prefix, _, part = name.rpartition(".")
        stacks.setdefault(f"{prefix}.{STACKS.get(part, part)}", []).append(name)
    return list(stacks.values())


def _format(quantize: str | None, name: str, source: str, in_features: int, plain: str) -> str:
    if quantize is None or in_features % GROUP:
        return plain
    if quantize == "native":
        return source if source in PACKED_FORMS else plain
    if quantize == "int4" and source in PACKED_FORMS and PACKED_FORMS[source].code_bits == 4:
        return source
    return "Q4_1" if quantize == "int4" and name not in TABLES else "Q8_0"
