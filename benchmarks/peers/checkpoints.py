"""The models in bfloat16 from which every engine makes its own: SmolLM2-135M, and random weights of Qwen2.5-0.5B's shape."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.workshop import SCRIPTS, Workshop
from octavo.models.locate import locate


def bundled() -> Path:
    """The installed Q4_1 file of SmolLM2-135M."""
    return locate("smollm2-135m")


def checkpoint(shop: Workshop, model: str) -> Path:
    """A directory with config.json and safetensors; ``model`` is smollm2 or qwen."""
    if model == "smollm2":
        return _made(shop, model, "make_hf.py", lambda target: [str(bundled()), str(target)])
    return _made(shop, model, "make_qwen.py", lambda target: [str(target), str(checkpoint(shop, "smollm2"))])


def compressed(shop: Workshop) -> Path:
    """SmolLM2-135M in W8A8, rounded to nearest, as a compressed-tensors checkpoint."""
    return _made(shop, "w8a8", "quant_ct.py", lambda target: [str(checkpoint(shop, "smollm2")), str(target), "w8a8"])


def models_of(workloads: str) -> list[str]:
    """Which checkpoints workloads read.

    >>> models_of("aq")
    ['smollm2', 'qwen']
    """
    return ["smollm2"] * bool(set(workloads) - {"q"}) + ["qwen"] * ("q" in workloads)


def _made(shop: Workshop, name: str, script: str, arguments: Callable[[Path], list[str]]) -> Path:
    def make(target: Path) -> None:
        shop.run(f"models-{name}", [sys.executable, str(SCRIPTS / script), *arguments(target)])

    return shop.made(f"models/{name}", make)
