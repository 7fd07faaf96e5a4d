"""llama.cpp, built from the sources that llama-cpp-python's sdist carries; ``llama-server`` over HTTP."""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.checkpoints import bundled
from benchmarks.peers.engines.base import RATE, WORKLOADS, free_port
from benchmarks.peers.process import Run
from benchmarks.peers.workshop import SCRIPTS, Workshop, size_mib

SDIST = "llama-cpp-python==0.3.36"
TYPES = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
SLOTS = {"a": 16, "b": 1, "c": 8, "d": 8, "e": 16}
"""-np: as many as served each workload best."""
TIMES = {"b": "5", "d": "3"}
FLAGS = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DCMAKE_SUPPRESS_REGENERATION=ON", "-DLLAMA_CURL=OFF"]


class LlamaCpp:
    name = "llama.cpp"
    workloads = "abcde"
    once = "ace"
    precisions: tuple[str, ...] = ("bf16", "int8", "int4")
    settings = (
        "llama-server over HTTP, GGML_NATIVE, 2 threads, -fa on -b 2048 -ub 512 --cache-ram 0, 1024 tokens a slot, slots "
        f"{', '.join(f'{letter.upper()} {count}' for letter, count in SLOTS.items())}; BF16, Q8_0, Q4_0, the last two from BF16; C: the first request "
        "alone, then the others"
    )

    def __init__(self, shop: Workshop) -> None:
        self._shop = shop

    def install(self) -> None:
        self._binaries = self._shop.made("llama.cpp", self._build) / "build" / "bin"

    def version(self) -> str:
        return f"of {SDIST}"

    def installed_mib(self) -> int:
        libraries = [f for f in self._binaries.glob("lib*.so*") if not any(tool in f.name for tool in ("bench", "perplexity", "quantize"))]
        return size_mib([self._binaries / "llama-server", *libraries])

    def prepare(self, precision: str, workloads: str) -> None:
        self._model(precision)

    def runs(self, precision: str, workloads: str) -> Iterator[Run]:
        server, model = str(self._binaries / "llama-server"), str(self._model(precision))
        for workload in (w for w in workloads if w in self.workloads):
            slots = SLOTS[workload]
            flags = f"-np {slots} -c {1024 * slots} -b 2048 -ub 512"
            argv = ["bash", str(SCRIPTS / "llama_server.sh"), server, model, WORKLOADS, workload.replace("e", "s"), flags, RATE]
            yield Run(self.name, precision, workload, argv, {"PORT": free_port(), "REPS": TIMES.get(workload, "1")})

    def _model(self, precision: str) -> Path:
        kind = TYPES[precision]

        def make(target: Path) -> None:
            target.mkdir()
            source = bundled() if kind == "BF16" else self._model("bf16")
            argv = [str(self._binaries / "llama-quantize"), "--allow-requantize", str(source), str(target / f"{kind}.gguf"), kind]
            self._shop.run(f"models-{kind}", argv)

        return self._shop.made(f"models/{kind}", make) / f"{kind}.gguf"

    def _build(self, target: Path) -> None:
        def run(*argv: str) -> None:
            self._shop.run("llama.cpp-install", list(argv))

        target.mkdir()
        only_sources = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        run(sys.executable, "-m", "pip", "download", *only_sources, "--dest", str(target), SDIST)
        [archive] = target.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
        [sources] = target.glob("*/vendor/llama.cpp")
        tools = Path(sys.executable).parent
        build = str(target / "build")
        run(str(tools / "cmake"), "-S", str(sources), "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", *FLAGS)
        targets = "llama-server", "llama-quantize", "llama-perplexity"  # the last for benchmarks/quality.py
        run(str(tools / "cmake"), "--build", build, "-j", str(os.cpu_count()), "--target", *targets)
