"""Which format each matrix runs in, and its size, from headers alone."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo.models.spec import DecoderSpec, RotarySpec
from octavo.models.weight_formats import PACKED_FORMS, choose_formats, packed_bytes

SPEC = DecoderSpec("LlamaForCausalLM", 2, 64, 4, 2, 16, 96, 300, 256, RotarySpec(16), tied_head=False)
MATRICES = SPEC.matrix_shapes()


def sources(default: str, **others: str) -> dict[str, str]:
    """Formats by the last part of a matrix's name; norms are always F32."""
    return {name: others.get(name.rpartition(".")[2], default) for name in MATRICES} | {"final_norm": "F32"}


def formats(default: str, dtype: str, quantize: str | None, **others: str) -> set[str]:
    return set(choose_formats(SPEC, sources(default, **others), dtype, quantize).formats.values())


@pytest.mark.parametrize(
    ("source", "dtype", "quantize", "expected"),
    [
        ("BF16", "auto", None, "bfloat16"), ("F32", "auto", None, "bfloat16"), ("BF16", "float32", None, "float32"),
        ("Q4_1", "auto", None, "Q4_1"), ("Q4_1", "bfloat16", None, "bfloat16"), ("Q4_1", "float32", None, "float32"),
        ("Q6_K", "auto", "native", "Q6_K"), ("Q6_K", "float32", "native", "Q6_K"),
        ("BF16", "auto", "int8", "Q8_0"), ("F32", "float32", "int8", "Q8_0"), ("Q4_1", "auto", "int8", "Q8_0"), ("Q8_0", "auto", "int8", "Q8_0"),
        ("Q4_0", "auto", "int4", "Q4_0"), ("Q4_K", "bfloat16", "int4", "Q4_K"), ("IQ4_XS", "auto", "int4", "IQ4_XS"),
    ],
)  # fmt: skip
def test_rules(source: str, dtype: str, quantize: str | None, expected: str) -> None:
    assert formats(source, dtype, quantize) == {expected}


@pytest.mark.parametrize("source", ["F32", "BF16", "Q8_0", "Q6_K", "Q5_1"])
def test_int4_gives_embedding_and_head_8_bits(source: str) -> None:
    chosen = choose_formats(SPEC, sources(source), "auto", "int4").formats
    assert {chosen["embed"], chosen["head"]} == {"Q8_0"}
    assert {format for name, format in chosen.items() if name not in ("embed", "head")} == {"Q4_1"}


def test_a_mixed_file_keeps_what_is_quantised() -> None:
    mixed = {"v": "Q6_K", "embed": "F16", "head": "Q8_0"}
    assert formats("Q4_K", "auto", None, **mixed) == {"Q4_K", "Q6_K", "Q8_0", "bfloat16"}
    assert formats("Q4_K", "auto", "int4", **mixed) == {"Q4_K", "Q4_1", "Q8_0"}
    assert formats("Q4_K", "auto", "int8", **mixed) == {"Q8_0"}


def test_native_without_quantised_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"keeps quantised weights as they are, but this model has none \(BF16\)"):
        formats("BF16", "auto", "native")


def test_what_is_quantised_anew() -> None:
    chosen = choose_formats(SPEC, sources("Q4_K", v="Q6_K", embed="BF16"), "auto", "int4")
    assert chosen.to_quantize == {"embed": "Q8_0", "layers.0.v": "Q4_1", "layers.1.v": "Q4_1"}
    assert not choose_formats(SPEC, sources("Q4_1"), "auto", None).to_quantize
    assert chosen.describe() == "Q4_1 + Q8_0 (quantised from Q6_K + BF16), Q4_K (kept)"


def test_descriptions() -> None:
    def describe(default: str, quantize: str | None, dtype: str = "auto", **others: str) -> str:
        return choose_formats(SPEC, sources(default, **others), dtype, quantize).describe()

    assert describe("Q4_1", None) == "Q4_1 (kept)"
    assert describe("Q4_1", None, embed="Q8_0") == "Q4_1 + Q8_0 (kept)"
    assert describe("Q4_1", None, "float32") == "float32 (from Q4_1)"
    assert describe("BF16", None) == "bfloat16 (from BF16)"
    assert describe("Q4_1", None, embed="F16", head="F16") == "Q4_1 (kept), bfloat16 (from F16)"


def test_rows_that_are_not_whole_groups_stay_floats() -> None:
    odd = DecoderSpec("LlamaForCausalLM", 1, 64, 4, 2, 16, 80, 300, 256, RotarySpec(16))
    chosen = choose_formats(odd, dict.fromkeys(odd.matrix_shapes(), "BF16"), "auto", "int8")
    assert {name for name, format in chosen.formats.items() if format == "bfloat16"} == {"layers.0.down"}


def test_every_quantised_format_can_be_kept() -> None:
    from octavo.kernels.dequantize import FORMATS

    assert set(FORMATS) - set(PACKED_FORMS) == {"F32", "F16", "BF16"}


@pytest.mark.parametrize("format", ["float32", "bfloat16", *PACKED_FORMS])
def test_sizes_are_those_of_the_packed_layout(format: str) -> None:
    native = pytest.importorskip("octavo._native")
    numbers = {name: number for number, (name, *_) in enumerate(native.formats())}
    number = numbers[{"float32": "F32", "bfloat16": "BF16"}.get(format, format)]
    for rows, columns in ((1, 256), (16, 512), (17, 768), (300, 1024)):
        assert packed_bytes(format, rows, columns) == native.matrix_bytes(number, rows, columns)


def test_a_float_beside_quantised_ones_is_float32() -> None:
    """It shares their input, which is float32."""
    chosen = choose_formats(SPEC, sources("Q4_1", k="F16"), "auto", None)
    assert chosen.formats["layers.1.k"] == "float32" and chosen.formats["layers.1.q"] == "Q4_1"
