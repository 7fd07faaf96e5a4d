"""OpenVINO GenAI: one environment to run it, whose size counts, and one to convert models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import THREADS
from benchmarks.peers.checkpoints import checkpoint, models_of
from benchmarks.peers.engines.base import WORKLOADS, repeated, version_in
from benchmarks.peers.process import Run
from benchmarks.peers.workshop import SCRIPTS, Workshop, size_mib

RUNTIME = "openvino-genai==2026.4.1.0"
EXPORT = (RUNTIME, "optimum-intel==2.2.0", "nncf==3.4.0", "torch==2.13.0")
FORMATS = {"bf16": ["fp16"], "int8": ["int8"], "int4": ["int4", "--group-size", "64", "--ratio", "1.0"]}
"""``--weight-format`` of optimum-cli; products in bfloat16 whatever the weights."""


class OpenVino:
    name = "OpenVINO"
    workloads = "abcdq"
    once = "q"
    precisions: tuple[str, ...] = ("bf16", "int8", "int4")
    settings = (
        f"{THREADS} threads, ContinuousBatchingPipeline, INFERENCE_PRECISION_HINT=bf16, max_num_batched_tokens=1024, max_num_seqs=64, cache_size=1 "
        "GiB in the plugin's own KV precision, prefix caching; weights fp16, int8 asymmetric, int4 asymmetric by 64; C: the first request alone, "
        "then the others"
    )

    def __init__(self, shop: Workshop) -> None:
        self._shop = shop

    def install(self) -> None:
        self._environment = self._shop.environment("openvino", [RUNTIME])

    def version(self) -> str:
        return version_in(self._environment, "openvino-genai")

    def installed_mib(self) -> int:
        return size_mib([self._environment])

    def prepare(self, precision: str, workloads: str) -> None:
        for model in models_of(workloads):
            self._exported(model, precision)

    def runs(self, precision: str, workloads: str) -> Iterator[Run]:
        if letters := repeated(workloads, "abccddd"):
            yield self._offline(precision, letters, letters.replace("c", "k"), "smollm2")
        if "q" in workloads:
            yield self._offline(precision, "q", "a", "qwen")

    def _offline(self, precision: str, workloads: str, letters: str, model: str) -> Run:
        python, script = self._environment / "bin" / "python", SCRIPTS / "run_ov.py"
        settings = ["reps=1", "cache_size=1", f"INFERENCE_NUM_THREADS={THREADS}", "INFERENCE_PRECISION_HINT=bf16"]
        return Run(
            self.name,
            precision,
            workloads,
            [str(python), str(script), str(self._exported(model, precision)), WORKLOADS, letters, *settings],
        )

    def _exported(self, model: str, precision: str) -> Path:
        name = f"openvino-{model}-{precision}"

        def make(target: Path) -> None:
            tools = self._shop.environment("openvino-export", EXPORT, without=["torchvision"])  # a CUDA build that breaks the import
            task = ["--model", str(checkpoint(self._shop, model)), "--task", "text-generation-with-past"]
            argv = [str(tools / "bin" / "optimum-cli"), "export", "openvino", *task, "--weight-format", *FORMATS[precision], str(target)]
            self._shop.run(f"models-{name}", argv)

        return self._shop.made(f"models/{name}", make)
