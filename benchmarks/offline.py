"""Workloads A and B of the shared benchmarks, start-up and memory: ``python benchmarks/offline.py [ab] [start] [installed]``."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import SHARED, THREADS, Limits, ratio, show

from octavo import LLM, SamplingParams

LAYER_WEIGHTS, HEAD_WEIGHTS = 106.2e6, 28.3e6  # of SmolLM2-135M
WORK_A = 5.3e12  # floating-point operations, attention included
START = "from octavo import LLM, SamplingParams; LLM('smollm2-135m', kv_memory='512MiB').generate('Hello', SamplingParams(max_tokens=1))"


def load(name: str) -> list[dict[str, Any]]:
    return list(json.loads((SHARED / "bench" / f"workload_{name}.json").read_text()))


def timed(llm: LLM, work: list[dict[str, Any]]) -> float:
    params = [SamplingParams(temperature=0.0, max_tokens=r["max_tokens"], ignore_eos=True, cache_prefix=False) for r in work]
    start = time.perf_counter()
    llm.generate([r["prompt"] for r in work], params)
    return time.perf_counter() - start


def bench_workloads(limits: Limits) -> None:
    work_a, work_b = load("a"), load("b")
    first = [dict(work_b[0], max_tokens=1)]
    output_a, output_b = sum(r["max_tokens"] for r in work_a), work_b[0]["max_tokens"]
    with LLM("smollm2-135m", kv_memory="512MiB", max_num_seqs=64, threads=THREADS) as llm:
        timed(llm, first)
        found: dict[str, list[float]] = {"a": [], "b": [], "first": [], "gflops": [], "read": []}
        for _ in range(3):
            limit = limits.measure()
            found["gflops"].append(limit.get("bf16_gflops", 0.0))
            found["read"].append(limit.get("read_gbs", 0.0))
            found["a"].append(timed(llm, work_a))
            for _ in range(3):
                found["b"].append(timed(llm, work_b))
                found["first"].append(timed(llm, first))
        m = {name: statistics.median(values) for name, values in found.items()}
        decode = (output_b - 1) / (m["b"] - m["first"])
        read = decode * (LAYER_WEIGHTS + HEAD_WEIGHTS) * 2 / 1e9
        rows = [
            [
                "A: 64 requests at once, wall",
                f"{m['a']:.2f} s",
                f"{output_a / m['a']:.0f} tokens/s",
                ratio(WORK_A / m["a"] / 1e9, m["gflops"]),
            ],
            ["B: one stream, decode", f"{1e3 / decode:.2f} ms", f"{decode:.1f} tokens/s", ratio(read, m["read"])],
            [
                "B: time to first token (128)",
                f"{1e3 * m['first']:.1f} ms",
                "",
                ratio(2 * 128 * LAYER_WEIGHTS / m["first"] / 1e9, m["gflops"]),
            ],
        ]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        title = f"SmolLM2-135M, bf16, limits {m['gflops']:.0f} GFLOP/s and {m['read']:.1f} GB/s in the same run; peak memory {peak:.0f} MiB"
        show(title, ["workload", "time", "rate", "of its limit"], rows)


def bench_start() -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", START], check=True)
        times.append(time.perf_counter() - start)
    show(
        "process start to first token",
        ["runs", "median", "fastest"],
        [[len(times), f"{statistics.median(times):.2f} s", f"{min(times):.2f} s"]],
    )


def bench_installed() -> None:
    """The run-time set in a fresh environment, without the model."""
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        pip = [sys.executable, "-m", "pip", "--python", f"{folder}/bin/python", "install", "--quiet"]
        subprocess.run([*pip, "-c", str(root / "constraints.txt"), str(root)], check=True)
        size = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file() and not f.is_symlink())
    show("installed", ["what", "size"], [["fresh run-time environment, without pip and model", f"{size / 2**20:.0f} MiB"]])


if __name__ == "__main__":
    which = set(sys.argv[1:]) or {"ab", "start", "installed"}
    if "ab" in which:
        if SHARED.is_dir():
            bench_workloads(Limits())
        else:
            print(f"workloads A and B are left out: {SHARED} is absent")
    if "start" in which:
        bench_start()
    if "installed" in which:
        bench_installed()
