"""Octavo: LLM inference around PagedAttention.

The pipeline is the package:

    request.py     (1) what is to be generated
    scheduler/     (2) which requests run in the next step, and how many tokens of each
    blocks/        (3) which physical blocks hold their keys and values, (4) the block tables
    kernels/       (5) attention that reads the blocks where they lie
    models/        (6) the transformer around it
    runner/        (7) running a plan, sampling the next tokens

``engine.core.EngineCore.step`` ties them together: schedule, execute, commit.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine
    from octavo.engine.outputs import CompletionOutput, RequestOutput
    from octavo.errors import (
        ConfigError,
        ContextLengthError,
        EngineClosedError,
        EngineError,
        InvalidRequestError,
        MemoryConfigError,
        ModelLoadError,
        OctavoError,
    )
    from octavo.llm import LLM
    from octavo.request import FinishReason, Logprob, SamplingParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "octavo.llm",
    "AsyncEngine": "octavo.engine.async_engine",
    "SamplingParams": "octavo.request",
    "FinishReason": "octavo.request",
    "Logprob": "octavo.request",
    "RequestOutput": "octavo.engine.outputs",
    "CompletionOutput": "octavo.engine.outputs",
    "OctavoError": "octavo.errors",
    "InvalidRequestError": "octavo.errors",
    "ContextLengthError": "octavo.errors",
    "ConfigError": "octavo.errors",
    "MemoryConfigError": "octavo.errors",
    "ModelLoadError": "octavo.errors",
    "EngineError": "octavo.errors",
    "EngineClosedError": "octavo.errors",
}
"""Where each public name lives; it is imported when it is first used."""

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "EngineClosedError",
    "EngineError",
    "FinishReason",
    "InvalidRequestError",
    "Logprob",
    "MemoryConfigError",
    "ModelLoadError",
    "OctavoError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
