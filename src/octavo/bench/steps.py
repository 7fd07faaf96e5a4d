"""Steps of the real engine, one by one: what each computes, and how long it takes."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.engine.core import EngineCore
from octavo.planner.arrivals import Arrivals, Lengths
from octavo.planner.latency_model import LinearLatency, StepLoad, fit, load_of
from octavo.planner.workload import Run, SimRequest, Workload
from octavo.request import SamplingParams
from octavo.scheduler.step import StepPlan, StepResult

LONGEST = 1536
"""Most tokens of one request that is measured."""
_AT_ONCE, _ONE_BY_ONE = Arrivals("at_once"), Arrivals("even", 1 / 6)
CALIBRATION = (
    Workload("short prompts, 12 at once", "", _AT_ONCE, Lengths("lognormal", 150, 1.0, high=900), Lengths("lognormal", 30, 0.8, high=100)),
    Workload("long prompts, one every 6 steps", "", _ONE_BY_ONE, Lengths("lognormal", 300, 0.7, high=900), Lengths("lognormal", 30, 0.8, high=100)),
    Workload("tiny prompts, 48 at once", "", _AT_ONCE, Lengths("lognormal", 30, 1.0, high=100), Lengths("lognormal", 20, 0.8, high=60)),
)  # fmt: skip
"""Arrivals are counted in steps, so that a workload gives the same plans each time that it is played."""
SIZES = (12, 8, 48)
"""Requests of each."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps that were measured."""

    loads: list[StepLoad]
    seconds: list[float]

    def __add__(self, other: Steps) -> Steps:
        return Steps(self.loads + other.loads, self.seconds + other.seconds)


class StepMeter:
    """Stands between an engine and its runner, and keeps what each step computes. ``clock`` tells seconds."""

    def __init__(self, core: EngineCore, clock: Callable[[], float] = time.perf_counter) -> None:
        self.core = core
        self.loads: list[StepLoad] = []
        self._clock = clock
        self._runner, core._runner = core._runner, self

    def execute(self, plan: StepPlan) -> StepResult:
        """What the engine calls."""
        self.loads.append(load_of(plan))
        return self._runner.execute(plan)

    def submit(self, request: SimRequest) -> int:
        """Queue a request, decoded greedily to its full length."""
        return self.core.add_request(request.token_ids(), SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True))

    def play(self, requests: Sequence[SimRequest]) -> Steps:
        """Run requests from an empty cache to their ends. Each arrives when so many steps have been taken as its ``arrival`` says."""
        self.core.reset_prefix_cache()
        self.loads.clear()
        coming, seconds = sorted(requests, key=lambda r: r.arrival, reverse=True), list[float]()
        while coming or self.core.has_work:
            while coming and (coming[-1].arrival <= len(seconds) or not self.core.has_work):
                self.submit(coming.pop())
            begin = self._clock()
            self.core.step()
            seconds.append(self._clock() - begin)
        return Steps(list(self.loads), seconds)

    def repeat(self, requests: Sequence[SimRequest], repeats: int, progress: Callable[[], None]) -> Steps:
        """The same several times, and the median of each step's times."""
        runs = []
        for _ in range(repeats):
            runs.append(self.play(requests))
            progress()
        assert all(run.loads == runs[0].loads for run in runs), "the same requests gave other steps"
        return Steps(runs[0].loads, [statistics.median(times) for times in zip(*(run.seconds for run in runs), strict=True)])


def drawn(workload: Workload, count: int, vocab_size: int, seed: int) -> list[SimRequest]:
    """Requests with random tokens, so that no prompt begins like another, of at most ``LONGEST`` tokens."""
    chance = random.Random(seed)
    requests = replace(workload, max_model_len=LONGEST).requests(count, seed)
    return [replace(r, prompt=tuple(Run(chance.randrange(vocab_size), 1) for _ in range(r.prompt_len))) for r in requests]


def warm_up(meter: StepMeter, vocab_size: int) -> None:
    """Touch every block once: memory that is touched for the first time takes time that no step takes again."""
    workload = Workload("warm-up", "", _AT_ONCE, Lengths("fixed", 1300), Lengths("fixed", 8))
    meter.play(drawn(workload, 5, vocab_size, 0))


def calibrate(meter: StepMeter, vocab_size: int, repeats: int, progress: Callable[[], None], seed: int = 1) -> list[Steps]:
    """The steps of each calibration workload."""
    pairs = zip(CALIBRATION, SIZES, strict=True)
    return [meter.repeat(drawn(workload, count, vocab_size, seed), repeats, progress) for workload, count in pairs]


def relative_errors(model: LinearLatency, steps: Steps) -> list[float]:
    """Of each step: prediction / measurement - 1."""
    return [model.seconds(load) / seconds - 1 for load, seconds in zip(steps.loads, steps.seconds, strict=True)]


def predicted_from_others(measured: Sequence[Steps]) -> list[tuple[Steps, LinearLatency]]:
    """Each workload's steps with the model fitted to all other workloads."""
    found = []
    for left_out in measured:
        others = sum((steps for steps in measured if steps is not left_out), Steps([], []))
        found.append((left_out, fit(others.loads, others.seconds)))
    return found


def fit_all(measured: Sequence[Steps]) -> LinearLatency:
    """The model of all steps."""
    together: Any = sum(measured, Steps([], []))
    return fit(together.loads, together.seconds)
