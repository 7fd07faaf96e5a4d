"""What a step costs beside the model: schedule, reserve, pack, commit, at 256 running requests, in Python alone."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import show

from octavo.blocks import BlockManager
from octavo.config import SchedulerConfig
from octavo.kernels.ops import Array, Int32, KVShape
from octavo.limits import RequestLimits, make_request
from octavo.models.spec import DecoderSpec
from octavo.planner.known_models import KNOWN_MODELS
from octavo.request import SamplingParams
from octavo.runner.model_runner import ModelRunner
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step import StepResult

RUNNING, MAX_MODEL_LEN = 256, 2048


class NullProgram:
    """Every op can be recorded, and none is run."""

    def run(self) -> None:
        pass

    def __getattr__(self, op: str) -> Callable[..., None]:
        return lambda *arguments, **options: None


class NullBackend:
    def program(self, sizes: Int32) -> NullProgram:
        return NullProgram()

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return np.empty(shape, np.float32)


def null_runner(spec: DecoderSpec) -> ModelRunner:
    """The runner without the model: rows, columns, results."""
    weights = SimpleNamespace(layers=(), head=SimpleNamespace(input_dtype="float32"))
    decoder: Any = SimpleNamespace(spec=spec, weights=weights, record=lambda *arguments: None)
    cache: Any = SimpleNamespace(shape=KVShape(spec.num_layers, RUNNING * 64, 16, spec.num_kv_heads, spec.head_dim, "bfloat16"))
    backend: Any = NullBackend()
    return ModelRunner(decoder, backend, cache, RUNNING, 512, MAX_MODEL_LEN)


def main() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=RUNNING), MAX_MODEL_LEN, BlockManager(RUNNING * 64, 16, prefix_caching=True))
    spec = KNOWN_MODELS["smollm2-135m"].spec
    limits = RequestLimits(spec.vocab_size, MAX_MODEL_LEN, RUNNING * 64 * 16)
    chance = np.random.default_rng(0)
    for i in range(RUNNING):
        prompt = chance.integers(1, spec.vocab_size, int(chance.integers(1, 100))).tolist()
        scheduler.add(make_request(i, prompt, SamplingParams(temperature=0.0, max_tokens=900), limits, 0.0))
    runner = null_runner(spec)
    times: dict[str, list[float]] = {"schedule + reserve": [], "pack + result": [], "commit": [], "all": []}
    for _ in range(700):
        marks = [time.perf_counter()]
        plan = scheduler.schedule(0.0)
        assert plan is not None
        marks.append(time.perf_counter())
        result = runner.execute(plan)
        marks.append(time.perf_counter())
        tokens = array("i", [7]) * len(result.token_ids)
        scheduler.commit(plan, StepResult(tokens), 0.0)
        marks.append(time.perf_counter())
        if plan.num_requests == RUNNING:
            for found, start, end in zip(times.values(), marks, marks[1:], strict=False):
                found.append(end - start)
            times["all"].append(marks[-1] - marks[0])
    rows = [[name, f"{1e6 * statistics.median(v):.0f}", f"{1e6 * sorted(v)[len(v) * 99 // 100]:.0f}"] for name, v in times.items()]
    show(f"Python per step at {RUNNING} running requests", ["part", "median µs", "p99 µs"], rows)


if __name__ == "__main__":
    main()
