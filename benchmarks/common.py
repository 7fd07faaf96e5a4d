"""What all benchmarks share: timing, the machine's ceilings, tables."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

SHARED = Path(os.environ.get("OCTAVO_SHARED", Path(__file__).parents[2] / "shared"))
"""Workloads and limits.cpp; their absence leaves out what needs them."""
THREADS = int(os.environ.get("OCTAVO_BENCH_THREADS", "2"))


def median_seconds(run: Callable[[], object], repeats: int = 7, at_least: float = 0.02) -> float:
    """The median over ``repeats`` of the time of one call, each measured over a loop of at least ``at_least`` seconds."""
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    loops = max(1, int(at_least / max(once, 1e-7)))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(loops):
            run()
        times.append((time.perf_counter() - start) / loops)
    return statistics.median(times)


def interleaved(runs: Sequence[Callable[[], object]], repeats: int = 7) -> list[float]:
    """Medians of several calls, measured A B C A B C …, so that a drifting machine slows all alike."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(repeats):
        for run, found in zip(runs, times, strict=True):
            found.append(median_seconds(run, repeats=1, at_least=0.01))
    return [statistics.median(found) for found in times]


class Limits:
    """The machine's ceilings, from limits.cpp; measured again at each call, since shared machines drift."""

    def __init__(self) -> None:
        self._binary: Path | None = None
        source = SHARED / "bench" / "limits.cpp"
        if source.is_file() and platform.machine() == "x86_64":
            self._binary = Path(tempfile.mkdtemp()) / "limits"
            flags = ["-O3", "-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-std=c++20", "-pthread"]
            subprocess.run(["g++", *flags, str(source), "-o", str(self._binary)], check=True)

    def measure(self) -> dict[str, float]:
        """bf16_gflops, int8_gops, read_gbs; empty where they cannot be measured."""
        if self._binary is None:
            return {}
        done = subprocess.run([self._binary, str(THREADS)], check=False, capture_output=True, text=True)
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def ratio(value: float, limit: float | None) -> str:
    return "-" if not limit else f"{value / limit:.0%}"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(width=140).print(table)
