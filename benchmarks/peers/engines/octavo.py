"""Octavo: the working tree, run by the Python that runs the harness."""

from __future__ import annotations

import compileall
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from benchmarks.common import THREADS
from benchmarks.peers.checkpoints import bundled, checkpoint, models_of
from benchmarks.peers.engines.base import RATE, WORKLOADS, free_port, repeated
from benchmarks.peers.process import Run
from benchmarks.peers.workshop import SCRIPTS, Workshop, size_mib

ROOT = Path(__file__).parents[3]
WEIGHTS = {"bf16": {"dtype": "bfloat16"}, "int8": {"quantize": "int8"}, "int4": {"quantize": "native"}}
"""Of SmolLM2-135M; 4 bit is the Q4_1 file as it is."""
QWEN_WEIGHTS = WEIGHTS | {"int4": {"quantize": "int4"}}


class Octavo:
    workloads = "abcdeq"
    once = "eq"
    precisions: tuple[str, ...] = ("bf16", "int8", "int4")

    def __init__(self, shop: Workshop, name: str, **options: str) -> None:
        self.name, self._shop, self._options = name, shop, options
        extra = "".join(f", {key}={value}" for key, value in options.items())
        self.settings = f"{THREADS} threads, kv_memory=512MiB, max_num_seqs=64{extra}; 4 bit: the Q4_1 file as it is, quantize=int4 at 0.5B"

    def install(self) -> None:
        self._environment = self._shop.environment("octavo", ["--constraint", str(ROOT / "constraints.txt"), str(ROOT)])
        compileall.compile_dir(ROOT / "src", quiet=1)  # as an installation is: a start is not the compiler's

    def version(self) -> str:
        return version("octavo")

    def installed_mib(self) -> int:
        return size_mib([self._environment])

    def prepare(self, precision: str, workloads: str) -> None:
        for model in models_of(workloads):
            checkpoint(self._shop, model)

    def runs(self, precision: str, workloads: str) -> Iterator[Run]:
        if letters := repeated(workloads, "abbbccddd"):
            yield self._offline(precision, letters, letters, self._model(precision), WEIGHTS[precision])
        if "e" in workloads:
            yield self._server(precision)
        if "q" in workloads:
            yield self._offline(precision, "q", "a", checkpoint(self._shop, "qwen"), QWEN_WEIGHTS[precision])

    def _model(self, precision: str) -> Path:
        return bundled() if precision == "int4" else checkpoint(self._shop, "smollm2")

    def _offline(self, precision: str, workloads: str, letters: str, model: Path, weights: dict[str, str]) -> Run:
        settings = [f"{key}={value}" for key, value in (weights | self._options).items()]
        argv = [sys.executable, str(SCRIPTS / "run_octavo.py"), str(model), WORKLOADS, letters, "reps=1", f"threads={THREADS}"]
        return Run(self.name, precision, workloads, argv + settings)

    def _server(self, precision: str) -> Run:
        options = WEIGHTS[precision] | self._options | {"kv_memory": "512MiB", "max_num_seqs": "64", "threads": str(THREADS)}
        flags = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in options.items())
        binary = Path(sys.executable).with_name("octavo")
        argv = ["bash", str(SCRIPTS / "octavo_server.sh"), str(binary), str(self._model(precision)), WORKLOADS, "s", flags, RATE]
        return Run(self.name, precision, "e", argv, {"PORT": free_port()})
