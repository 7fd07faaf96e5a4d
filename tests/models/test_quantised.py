"""Quantised checkpoints and their cache: the blocks are those of the definition, whether made now, found on disk, or not kept at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ModelLoadError
from octavo.kernels.backends import create_backend
from octavo.kernels.dequantize import dequantize
from octavo.kernels.ops import Backend
from octavo.kernels.quantize import quantize as definition
from octavo.models import quantised_cache
from octavo.models.quantised import Quantised, quantize
from octavo.models.quantised_cache import cache_size
from octavo.models.weights import Checkpoint, open_checkpoint
from octavo.user_cache import cache_directory
from tests.models import tiny

pytest.importorskip("transformers")
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny.write("untied", tmp_path / "model", **SIZES)
    return tmp_path / "model"


def wanted(checkpoint: Checkpoint, format: str = "Q4_1") -> dict[str, str]:
    return dict.fromkeys(checkpoint.spec.matrix_shapes(), format)


def load(path: Path, format: str = "Q4_1", backend: Backend | None = None) -> Quantised:
    checkpoint = open_checkpoint(path)
    return quantize(checkpoint, wanted(checkpoint, format), backend or create_backend("auto", 1), lambda done, total: None)


def check(found: Quantised, path: Path, format: str = "Q4_1") -> None:
    """Each matrix is the definition's, everything else is as it was."""
    plain = open_checkpoint(path)
    for name in plain.names:
        source, original = found.checkpoint.tensor(name), plain.tensor(name)
        assert source.shape == original.shape
        if name in plain.spec.matrix_shapes():
            weights = dequantize(original.format, original.data, int(np.prod(original.shape))).reshape(original.shape)
            weights = weights if original.row_order is None else weights[original.row_order]
            assert source.format == format and source.row_order is None
            assert np.array_equal(source.data, definition(format, weights))
        else:
            assert source.format == original.format and np.array_equal(source.data, original.data)
        found.checkpoint.release(source)


class Refusing:
    """A backend that must not be asked."""

    def quantize(self, source: object, format: str) -> None:
        raise AssertionError("quantised again")


@pytest.mark.parametrize("format", ["Q4_1", "Q8_0"])
def test_made_once_and_found_again(format: str, model: Path, cache: Path) -> None:
    first = load(model, format)
    check(first, model, format)
    [file] = cache.iterdir()
    assert str(file) in first.cache and "kept in" in first.cache and cache_size() == file.stat().st_size
    again = load(model, format, Refusing())  # type: ignore[arg-type]
    assert "found in" in again.cache
    check(again, model, format)


def test_gguf_with_permuted_rows(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "model.gguf"
    tiny.write_gguf("plain", path, "Q8_0", **SIZES)
    check(load(path), path)
    check(load(path, backend=Refusing()), path)  # type: ignore[arg-type]


def test_each_format_has_its_own_file(model: Path, cache: Path) -> None:
    load(model, "Q4_1"), load(model, "Q8_0")
    assert len(list(cache.iterdir())) == 2
    load(model, "Q4_1", Refusing()), load(model, "Q8_0", Refusing())  # type: ignore[arg-type]


def test_other_weights_at_the_same_place_are_quantised_again(model: Path, cache: Path) -> None:
    load(model)
    [old] = cache.iterdir()
    tiny.write("untied", model, seed=1, **SIZES)
    os.utime(model / "model.safetensors", ns=(1, 1))
    check(load(model), model)
    assert list(cache.iterdir()) == [old]
    check(load(model, backend=Refusing()), model)  # type: ignore[arg-type]


def test_another_version_of_the_quantisers_is_stale(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(model)
    monkeypatch.setattr(quantised_cache, "VERSION", 99)
    assert "kept in" in load(model).cache


@pytest.mark.parametrize("place", [0, 5, 40, 200, 700, 2000, -1, -5000])
def test_a_flipped_bit_anywhere_is_noticed(place: int, model: Path, cache: Path) -> None:
    load(model)
    [file] = cache.iterdir()
    good = file.read_bytes()
    damaged = bytearray(good)
    damaged[place] ^= 4
    file.write_bytes(damaged)
    check(load(model), model)
    assert file.read_bytes() == good


@pytest.mark.parametrize("content", [b"", b"GGUF", bytes(10_000)])
def test_rubbish_is_replaced(content: bytes, model: Path, cache: Path) -> None:
    load(model)
    [file] = cache.iterdir()
    file.write_bytes(content)
    check(load(model), model)
    check(load(model, backend=Refusing()), model)  # type: ignore[arg-type]


def test_a_truncated_file_is_replaced(model: Path, cache: Path) -> None:
    load(model)
    [file] = cache.iterdir()
    os.truncate(file, file.stat().st_size - 100)
    check(load(model), model)


def test_what_cannot_be_written_is_no_failure(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    found = load(model)
    assert found.cache.startswith("not kept for the next start: ") and str(tmp_path / "file") in found.cache
    check(found, model)


def test_a_full_disk_leaves_nothing_behind(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(entry: object, file: object, tensors: object) -> None:
        next(iter(tensors))  # type: ignore[call-overload]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantised_cache.CacheEntry, "_write", full)
    found = load(model)
    assert "No space left on device" in found.cache and not list(cache.iterdir())
    check(found, model)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, cache: Path) -> None:
    import torch

    broken = tiny.build("untied", **SIZES)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    broken.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight cannot be quantised"):
        load(tmp_path / "model")
    assert not list(cache.iterdir())


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg/octavo"
    for relative in ("", "some/where"):  # the standard: a relative path is to be ignored
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert cache_directory() == tmp_path / ".cache/octavo"
    monkeypatch.setenv("OCTAVO_CACHE", "~/mine")
    assert cache_directory() == tmp_path / "mine" and cache_size() == 0


def test_only_the_owner_reads_it(model: Path, cache: Path) -> None:
    load(model)
    [file] = cache.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
