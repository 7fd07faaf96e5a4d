"""The simulator against the engine: fit a latency model to measured steps, then predict another workload and measure it.

    python benchmarks/fidelity.py [--threads N] [--cpu-time] [--save latency.json]

Steps are timed as the engine runs them: scheduling, kernels, sampling, commit. The workload that is predicted has other
lengths, and arrives by a Poisson process. It is measured between two halves of what is fitted to, so that a machine that gets slower
or faster meanwhile misleads less. Where others use the machine too, --cpu-time lets the engine's clock run on this process's CPU time, of one
thread, and skips what it would have slept.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo import LLM
from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.planner.arrivals import Arrivals, Lengths
from octavo.planner.latency_model import LinearLatency, StepLoad, fit, load_of
from octavo.planner.replica import Record, SimConfig
from octavo.planner.report import latency, percentiles, table, tpot, ttft
from octavo.planner.simulate import simulate
from octavo.planner.workload import Run, SimRequest, Workload
from octavo.request import SamplingParams
from octavo.scheduler.step import StepPlan, StepResult

BUDGET, BLOCK_SIZE, NUM_BLOCKS, LONGEST = 256, 16, 400, 1536


class Clock:
    """Seconds of the wall, or of this process's CPU."""

    def __init__(self, cpu_time: bool) -> None:
        self.read = time.process_time if cpu_time else time.perf_counter
        self.cpu_time = cpu_time
        self.skipped = 0.0

    def __call__(self) -> float:
        return self.read() + self.skipped

    def wait(self, seconds: float) -> None:
        if self.cpu_time:
            self.skipped += max(0.0, seconds)
        else:
            time.sleep(max(0.0, seconds))


class Watch:
    """Stands before a runner and keeps what each step computed."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.loads: list[StepLoad] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.loads.append(load_of(plan))
        return self.runner.execute(plan)  # type: ignore[no-any-return]


def drawn(seed: int, count: int, prompt: Lengths, output: Lengths, arrivals: Arrivals, vocab_size: int) -> list[SimRequest]:
    """Requests with random tokens, so that no prompt begins like another."""
    chance = random.Random(seed)
    requests = Workload("fidelity", "", arrivals, prompt, output, max_model_len=LONGEST).requests(count, seed)
    return [replace(r, prompt=tuple(Run(chance.randrange(vocab_size), 1) for _ in range(r.prompt_len))) for r in requests]


def play(
    core: EngineCore, watch: Watch, clock: Clock, requests: list[SimRequest]
) -> tuple[list[StepLoad], list[float], list[Record], float]:
    """Run requests in real time. Returns each step's load and seconds, what became of the requests, and the time of all."""
    watch.loads.clear()
    times: list[float] = []
    records, live, coming = [], {}, sorted(requests, key=lambda r: r.arrival)
    start = clock()
    while coming or live:
        now = clock() - start
        while coming and coming[0].arrival <= now:
            request = coming.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True)
            live[core.add_request(request.token_ids(), params)] = request
        if not live:
            clock.wait(coming[0].arrival - now)
            continue
        begin = clock()
        updates = core.step()
        times.append(clock() - begin)
        for update in updates:
            if update.finish_reason is not None and update.metrics is not None:
                request = live.pop(update.request_id)
                arrival = start + request.arrival  # the engine hears of it between two steps, up to one step later
                records.append(Record(request, 0, arrival, update.metrics, request.output_len, "length"))
    return list(watch.loads), times, records, clock() - start


def figures(records: list[Record], seconds: float) -> dict[str, float]:
    found = {"output tokens/s": sum(r.num_output for r in records) / seconds}
    for name, figure in (("TTFT", ttft), ("TPOT", tpot), ("end to end", latency)):
        values = percentiles(x for x in map(figure, records) if x is not None)
        found |= {f"{name} {p} (ms)": values[p] * 1e3 for p in ("p50", "p90")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--save", type=Path, default=None)
    args = parser.parse_args()
    llm = LLM("smollm2-135m", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=LONGEST, max_num_seqs=32,
              max_num_batched_tokens=BUDGET, threads=1 if args.cpu_time else args.threads)  # fmt: skip
    core, clock = llm.engine.core, Clock(args.cpu_time)
    core._clock = clock
    watch = Watch(core._runner)
    core._runner = watch
    vocab = llm.vocab_size
    at_once, uneven = Arrivals("at_once"), Arrivals("poisson", 1.5)
    play(core, watch, clock, drawn(0, 5, Lengths("fixed", 1300), Lengths("fixed", 8), at_once, vocab))  # first touch of every block
    short, long = Lengths("lognormal", 150, 1.0, high=900), Lengths("lognormal", 300, 0.7, high=900)
    known = [
        drawn(seed, count, prompt, Lengths("lognormal", 30, 0.8, high=100), arrivals, vocab)
        for seed, (count, prompt, arrivals) in enumerate([(12, short, at_once), (8, long, uneven)] * 2, 1)
    ]
    asked = drawn(9, args.requests, Lengths("lognormal", 200, 0.8, high=1000), Lengths("lognormal", 40, 0.7, high=120), uneven, vocab)
    loads, times = [], []
    for requests in (*known[:2], asked, *known[2:]):
        some, their, ended, took = play(core, watch, clock, requests)
        if requests is asked:
            measured_loads, measured_times, records, seconds = some, their, ended, took
        else:
            loads, times = loads + some, times + their
    model = fit(loads, times)
    report(model, asked, figures(records, seconds), loads, times, measured_loads, measured_times)
    if args.save is not None:
        args.save.write_text(json.dumps(model.as_dict(), indent=1))


def report(
    model: LinearLatency, asked: list[SimRequest], measured: dict[str, float], loads: list[StepLoad], times: list[float],
    other_loads: list[StepLoad], other_times: list[float],
) -> None:  # fmt: skip
    config = SimConfig(NUM_BLOCKS * BLOCK_SIZE, "paged", BLOCK_SIZE, SchedulerConfig(32, BUDGET), LONGEST, accounting="none")
    result = simulate(asked, config, model)
    predicted = figures(result.records, result.seconds + min(r.arrival for r in asked))
    print("coefficients, microseconds:", {name: round(value * 1e6, 4) for name, value in model.as_dict().items()})
    for name, some, their in (("fitted", loads, times), ("predicted", other_loads, other_times)):
        errors = percentiles(abs(model.seconds(load) / seconds - 1) for load, seconds in zip(some, their, strict=True))
        total = sum(map(model.seconds, some)) / sum(their)
        print(f"steps {name}: {len(some)}, relative error p50 {errors['p50']:.1%}, p90 {errors['p90']:.1%}; sum {total - 1:+.1%}")
    print(table(["figure", "measured", "predicted", "error"],
                [[k, measured[k], predicted[k], f"{predicted[k] / measured[k] - 1:+.1%}"] for k in measured]))  # fmt: skip


if __name__ == "__main__":
    main()
