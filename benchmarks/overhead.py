"""What a step costs beside the model: schedule, reserve, pack, commit, at 256 running requests, in Python alone."""

from __future__ import annotations

import statistics
import time
from array import array

import numpy as np
from common import show

from octavo.blocks import BlockManager
from octavo.config import SchedulerConfig
from octavo.limits import RequestLimits, make_request
from octavo.request import SamplingParams
from octavo.runner.batch import Batch, RequestRows
from octavo.runner.sampler import Sampler
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step import StepPlan, StepResult

RUNNING, MAX_MODEL_LEN, VOCAB = 256, 2048, 49152


class Packing:
    """The runner's Python without the model: rows, arrays, results."""

    def __init__(self) -> None:
        self.rows = RequestRows(RUNNING)
        self.batch = Batch(RUNNING, 512, 512, MAX_MODEL_LEN, 16)
        self.sampler = Sampler(RUNNING, 512, VOCAB, self.batch.history)

    def pack(self, plan: StepPlan) -> None:
        for admission in plan.admitted:
            row = self.rows.admit(admission.request_id)
            self.batch.admit(row, admission)
            self.sampler.admit(row, admission)
        rows = self.rows.of(plan.request_ids)
        self.batch.pack(plan, rows)
        inputs = self.batch.inputs
        self.sampler.pack(plan, rows, inputs.batch.query_starts, inputs.sampled_rows)


def main() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=RUNNING), MAX_MODEL_LEN, BlockManager(RUNNING * 64, 16, prefix_caching=True))
    limits = RequestLimits(VOCAB, MAX_MODEL_LEN, RUNNING * 64 * 16)
    chance = np.random.default_rng(0)
    for i in range(RUNNING):
        prompt = chance.integers(1, VOCAB, int(chance.integers(1, 100))).tolist()
        scheduler.add(make_request(i, prompt, SamplingParams(temperature=0.0, max_tokens=900), limits, 0.0))
    packing = Packing()
    times: dict[str, list[float]] = {"schedule + reserve": [], "pack": [], "result": [], "commit": [], "all": []}
    for _ in range(700):
        marks = [time.perf_counter()]
        plan = scheduler.schedule(0.0)
        assert plan is not None
        marks.append(time.perf_counter())
        packing.pack(plan)
        marks.append(time.perf_counter())
        result: StepResult = packing.sampler.result(plan)
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
