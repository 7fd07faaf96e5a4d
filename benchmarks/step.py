"""Where the time of a step goes: SmolLM2-135M at a few shapes of step, by kind of op, and what Python adds."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict

from common import THREADS, show

from octavo import LLM, SamplingParams

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


def main() -> None:
    found = {name: profile_decodes(*shape) for name, shape in SHAPES.items()}
    names = sorted({op for ops, _ in found.values() for op in ops}, key=lambda op: -found["64 decodes"][0].get(op, 0.0))
    rows = [[op, *(f"{1e6 * ops.get(op, 0.0):.0f}" for ops, _ in found.values())] for op in names]
    rows.append(["all ops", *(f"{1e6 * sum(ops.values()):.0f}" for ops, _ in found.values())])
    rows.append(["engine step", *(f"{1e6 * wall:.0f}" for _, wall in found.values())])
    rows.append(["Python's share", *(f"{max(0.0, 1 - sum(ops.values()) / wall):.1%}" for ops, wall in found.values())])
    show("a decode step by op, µs", ["op", *found], rows)


if __name__ == "__main__":
    main()
