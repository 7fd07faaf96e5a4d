"""Checkpoints opened: every tensor equal to what transformers wrote; every mismatch refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ModelLoadError
from octavo.kernels.dequantize import dequantize
from octavo.models.safetensors import SafetensorsFile
from octavo.models.weights import _HF_NAMES, Checkpoint, _file_name, open_checkpoint
from tests.models import tiny

pytest.importorskip("torch")
pytest.importorskip("transformers")


def _values(checkpoint: Checkpoint, name: str) -> Any:
    source = checkpoint.tensor(name)
    values = dequantize(source.format, source.data, int(np.prod(source.shape))).reshape(source.shape)
    return values if source.row_order is None else values[source.row_order]


def _check(checkpoint: Checkpoint, model: Any, atol: float = 0.0) -> None:
    state = {name: value.float().numpy() for name, value in model.state_dict().items()}
    for name in checkpoint.names:
        expected = state.pop(_file_name(name, _HF_NAMES, "model.layers"))
        np.testing.assert_allclose(_values(checkpoint, name), expected, rtol=0, atol=atol, err_msg=name)
    if checkpoint.spec.tied_head:
        del state["lm_head.weight"]
    assert not state


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_directories(variant: str, tmp_path: Path) -> None:
    model = tiny.write(variant, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    _check(checkpoint, model)
    assert checkpoint.generation.eos_token_ids == {2} and checkpoint.generation.bos_token_id == 1
    assert checkpoint.metadata is None and checkpoint.path == tmp_path
    source = checkpoint.tensor("layers.0.q")
    assert source.format == ("BF16" if variant == "bf16" else "F32") and not source.data.flags.owndata
    checkpoint.release(source)
    _check(checkpoint, model)


def test_sharded_directory(tmp_path: Path) -> None:
    model = tiny.write("untied", tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    _check(open_checkpoint(tmp_path), model)


@pytest.mark.parametrize("variant", ["plain", "wide_heads", "many_kv_heads", "biases", "qwen2"])
def test_gguf_files(variant: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = tiny.write_gguf(variant, tmp_path / "model.gguf")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    _check(checkpoint, model)
    assert checkpoint.generation.eos_token_ids == {2} and checkpoint.generation.bos_token_id == 1
    assert (checkpoint.tensor("layers.0.k").row_order is None) == (variant == "qwen2")


def test_quantised_gguf_file(tmp_path: Path) -> None:
    """Q8_0 is within half a step of 1/127 of the greatest weight; a wrong order of rows or blocks is far off."""
    pytest.importorskip("gguf")
    model = tiny.write_gguf("plain", tmp_path / "model.gguf", "Q8_0", hidden_size=64)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.tensor("layers.1.gate").format == "Q8_0"
    _check(checkpoint, model, atol=max(float(value.abs().max()) for value in model.state_dict().values()) / 127 * 0.51)


def _rewrite(path: Path, change: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("plain", {"num_hidden_layers": 3}, r"model\.layers\.2\.input_layernorm\.weight of shape \(48,\) is missing|layers\.2\."),
        ("plain", {"num_hidden_layers": 2**30}, "1073741824 layers"),
        ("plain", {"num_hidden_layers": 1}, "is not part of LlamaForCausalLM"),
        ("plain", {"intermediate_size": 81}, r"gate_proj\.weight has shape \(80, 48\); the config asks for \(81, 48\)"),
        ("plain", {"tie_word_embeddings": False}, r"lm_head\.weight of shape \(300, 48\) is missing"),
        ("biases", {"attention_bias": False}, r"bias is not part of"),
    ],
)
def test_mismatches_are_refused(variant: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny.write(variant, tmp_path)
    _rewrite(tmp_path, lambda config: config.update(changes))
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(tmp_path)


def test_generation_config_comes_first(tmp_path: Path) -> None:
    tiny.write("plain", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    generation = open_checkpoint(tmp_path).generation
    assert generation.eos_token_ids == {5, 7} and generation.bos_token_id == 1


def test_damaged_json_is_refused(tmp_path: Path) -> None:
    tiny.write("plain", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(ModelLoadError, match="name of a file beside it"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelLoadError, match="cannot be read as JSON"):
        open_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def safetensors_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safetensors")
    tiny.write("plain", path, num_hidden_layers=1, hidden_size=8, head_dim=2, intermediate_size=4, vocab_size=10)
    return path / "model.safetensors"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_safetensors(data: st.DataObject, safetensors_file: Path, tmp_path: Path) -> None:
    content, path = bytearray(safetensors_file.read_bytes()), tmp_path / "damaged.safetensors"
    header = struct.unpack_from("<Q", content)[0] + 8
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.sampled_from(b'0199{}[]",:-e') | st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    try:
        file = SafetensorsFile(path)
        for name in file.shapes:
            file.release(file.source(name))
    except ModelLoadError:
        pass
