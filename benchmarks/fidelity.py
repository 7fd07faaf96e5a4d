"""The simulator against the engine: fit a latency model to measured steps, then predict another workload and measure it.

    python benchmarks/fidelity.py [--threads N] [--cpu-time] [--requests N]

Steps are timed as the engine runs them: scheduling, kernels, sampling, commit. The workload that is predicted has other
lengths, and arrives by a Poisson process. It is measured between two calibrations (those of ``octavo bench kernels``), so that a machine
that gets slower or faster meanwhile misleads less. Where others use the machine too, --cpu-time lets the engine's clock run on this
process's CPU time, of one thread, and skips what it would have slept.
"""

from __future__ import annotations

import argparse
import time

from octavo.bench.kernels import BUDGET, MAX_NUM_SEQS, POOL_TOKENS, STEP_REPEATS, engine_config
from octavo.bench.steps import LONGEST, StepMeter, Steps, calibrate, drawn, fit_all, relative_errors, warm_up
from octavo.config import SchedulerConfig
from octavo.engine.build import build_engine
from octavo.planner.arrivals import Arrivals, Lengths
from octavo.planner.latency_model import LinearLatency
from octavo.planner.replica import Record, SimConfig
from octavo.planner.report import latency, percentiles, tpot, ttft
from octavo.planner.simulate import simulate
from octavo.planner.tables import table
from octavo.planner.workload import SimRequest, Workload

ASKED = Workload(
    "asked", "", Arrivals("poisson", 1.5), Lengths("lognormal", 200, 0.8, high=1000), Lengths("lognormal", 40, 0.7, high=120)
)  # fmt: skip


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


def play(meter: StepMeter, clock: Clock, requests: list[SimRequest]) -> tuple[Steps, list[Record], float]:
    """Run requests in real time. Returns the steps, what became of the requests, and the time of all."""
    meter.core.reset_prefix_cache()
    meter.loads.clear()
    times, records, live, coming = list[float](), list[Record](), dict[int, SimRequest](), sorted(requests, key=lambda r: r.arrival)
    start = clock()
    while coming or live:
        now = clock() - start
        while coming and coming[0].arrival <= now:
            request = coming.pop(0)
            live[meter.submit(request)] = request
        if not live:
            clock.wait(coming[0].arrival - now)
            continue
        begin = clock()
        updates = meter.core.step()
        times.append(clock() - begin)
        for update in updates:
            if update.finish_reason is not None and update.metrics is not None:
                request = live.pop(update.request_id)
                arrival = start + request.arrival  # the engine hears of it between two steps, up to one step later
                records.append(Record(request, 0, arrival, update.metrics, request.output_len, "length"))
    return Steps(list(meter.loads), times), records, clock() - start


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
    args = parser.parse_args()
    built = build_engine(engine_config("smollm2-135m", threads=1 if args.cpu_time else args.threads))
    core, clock, vocab = built.engine.core, Clock(args.cpu_time), built.spec.vocab_size
    core._clock = clock
    meter = StepMeter(core, clock)
    warm_up(meter, vocab)
    asked = drawn(ASKED, args.requests, vocab, 9)
    before = calibrate(meter, vocab, STEP_REPEATS, lambda: None)
    steps, records, seconds = play(meter, clock, asked)
    after = calibrate(meter, vocab, STEP_REPEATS, lambda: None)
    model = fit_all([*before, *after])
    report(model, asked, figures(records, seconds), {"fitted, before": before, "fitted, after": after, "predicted": [steps]})


def report(model: LinearLatency, asked: list[SimRequest], measured: dict[str, float], measurements: dict[str, list[Steps]]) -> None:
    config = SimConfig(POOL_TOKENS, "paged", 16, SchedulerConfig(MAX_NUM_SEQS, BUDGET), LONGEST, accounting="none")
    result = simulate(asked, config, model)
    predicted = figures(result.records, result.end)
    print("coefficients, microseconds:", {name: round(value * 1e6, 4) for name, value in model.as_dict().items()})
    for name, parts in measurements.items():
        steps = sum(parts, Steps([], []))
        errors = percentiles(map(abs, relative_errors(model, steps)))
        total = sum(map(model.seconds, steps.loads)) / sum(steps.seconds)
        print(f"steps {name}: {len(steps.loads)}, relative error p50 {errors['p50']:.1%}, p90 {errors['p90']:.1%}; sum {total - 1:+.1%}")
    print(table(["figure", "measured", "predicted", "error"],
                [[k, measured[k], predicted[k], f"{predicted[k] / measured[k] - 1:+.1%}"] for k in measured]))  # fmt: skip


if __name__ == "__main__":
    main()
