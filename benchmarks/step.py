"""Where the time of a step goes, by kind of op: ``python benchmarks/step.py`` at a few shapes, with what Python adds; ``... workload`` in A."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

from common import SHARED, THREADS, show

from octavo import LLM, SamplingParams
from octavo.kernels.ops import Size

SHAPES = {"1 decode": (1, 128), "8 decodes": (8, 200), "64 decodes": (64, 250)}


def profile_decodes(num_requests: int, context: int, steps: int = 24) -> tuple[dict[str, float], float]:
    """Seconds a step by op, and of a whole step of the engine, medians over decode steps."""
    ops: dict[str, list[float]] = defaultdict(list)
    walls: list[float] = []
    with LLM("smollm2-135m", kv_memory="1GiB", threads=THREADS, max_num_batched_tokens=8192) as llm:
        core = llm.engine.core
        for i in range(num_requests):
            core.add_request(
                [5 + (i * 7 + j) % 1000 for j in range(context)], SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
            )
        program = core._runner._program  # type: ignore[attr-defined]
        core.step()
        for _ in range(steps):
            start = time.perf_counter()
            core.step()
            walls.append(time.perf_counter() - start)
            for name, seconds in program.profile().items():
                ops[name].append(seconds)
    return {name: statistics.median(values) for name, values in ops.items()}, statistics.median(walls)


class Profiled:
    """A program that is profiled whenever it runs, with the step's numbers of rows and requests."""

    def __init__(self, runner: Any) -> None:
        self._program, self._counts = runner._program, runner._counts
        self.steps: list[tuple[int, int, dict[str, float]]] = []

    def run(self) -> None:
        self.steps.append((*self._counts[: Size.REQUESTS + 1], self._program.profile()))


PHASES = {
    "256 rows or more": lambda rows, requests: rows >= 256,
    "56 requests or more": lambda rows, requests: requests >= 56,
    "16 to 55": lambda rows, requests: requests >= 16,
    "fewer than 16": lambda rows, requests: True,
}
"""Of a step, the first that fits."""


def profile_workload() -> None:
    """Workload A: each phase's share of the time, and each op's share of its phase."""
    work = json.loads((SHARED / "bench" / "workload_a.json").read_text())
    params = [SamplingParams(temperature=0.0, max_tokens=r["max_tokens"], ignore_eos=True, cache_prefix=False) for r in work]
    with LLM("smollm2-135m", kv_memory="512MiB", max_num_seqs=64, threads=THREADS) as llm:
        llm.generate([[1]], SamplingParams(max_tokens=1))
        runner: Any = llm.engine.core._runner  # type: ignore[attr-defined]
        program = runner._program = Profiled(runner)
        start = time.perf_counter()
        llm.generate([r["prompt"] for r in work], params)
        wall = time.perf_counter() - start
    phases: dict[str, list[tuple[int, int, dict[str, float]]]] = {name: [] for name in PHASES}
    for step in program.steps:
        phases[next(name for name, fits in PHASES.items() if fits(*step[:2]))].append(step)
    rows = []
    for name, steps in phases.items():
        ops: dict[str, float] = defaultdict(float)
        for _, _, times in steps:
            for op, seconds in times.items():
                ops[op] += seconds
        total = sum(ops.values())
        largest = sorted(ops.items(), key=lambda entry: -entry[1])[:7]
        shares = ", ".join(f"{op} {seconds / total:.1%}" for op, seconds in largest)
        rows.append([name, len(steps), sum(step[0] for step in steps), f"{total / wall:.1%}", shares])
    show(f"workload A, {wall:.2f} s with profiling", ["steps of", "steps", "rows", "of the time", "of which"], rows)


def main() -> None:
    found = {name: profile_decodes(*shape) for name, shape in SHAPES.items()}
    names = sorted({op for ops, _ in found.values() for op in ops}, key=lambda op: -found["64 decodes"][0].get(op, 0.0))
    rows = [[op, *(f"{1e6 * ops.get(op, 0.0):.0f}" for ops, _ in found.values())] for op in names]
    rows.append(["all ops", *(f"{1e6 * sum(ops.values()):.0f}" for ops, _ in found.values())])
    rows.append(["engine step", *(f"{1e6 * wall:.0f}" for _, wall in found.values())])
    rows.append(["Python's share", *(f"{max(0.0, 1 - sum(ops.values()) / wall):.1%}" for ops, wall in found.values())])
    show("a decode step by op, µs", ["op", *found], rows)


if __name__ == "__main__":
    profile_workload() if "workload" in sys.argv[1:] else main()
