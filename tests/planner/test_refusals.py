"""Requests that a simulated engine refuses are counted by their true reasons."""

from __future__ import annotations

from octavo.config import SchedulerConfig
from octavo.planner.known_models import KNOWN_MODELS
from octavo.planner.latency_model import LinearLatency
from octavo.planner.replica import SimConfig
from octavo.planner.report import summarise
from octavo.planner.simulate import simulate
from octavo.planner.studies import Study, run_study
from octavo.planner.workload import SimRequest, own_run

CONFIG = SimConfig(1024, scheduler=SchedulerConfig(4, 64), max_model_len=1024)


def request(number: int, prompt: int, output: int = 3, beams: int = 0) -> SimRequest:
    return SimRequest(number, 0.0, (own_run(number, prompt),), output, n=beams or 1, beams=beams > 0)


def refusals(*requests: SimRequest, processes: int = 1) -> dict[str, int]:
    result = simulate(requests, CONFIG, LinearLatency(per_step=1.0), num_replicas=2, processes=processes)
    return dict(summarise(result)["refusals"])


def test_each_reason_is_counted() -> None:
    requests = (
        request(0, 5000), request(1, 1023, 2), request(2, 9), request(3, 10**12),
        request(4, 9, beams=5), request(5, 300, 200, beams=4), request(6, 300, 100, beams=4),
    )  # fmt: skip
    found = {
        "longer than 1,024 tokens": 3,
        "more than the KV memory's 1,024 tokens hold": 1,
        "beam_width=5 beams run together, but max_num_seqs is 4": 1,
    }
    assert refusals(*requests) == found == refusals(*requests, processes=2)
    assert refusals(request(0, 9)) == {}


def test_the_head_of_a_study_tells_the_reason() -> None:
    study = Study("chat", KNOWN_MODELS["llama-3.1-8b"], kv_memory="1GiB", max_num_seqs=8)
    wide = [request(number, 9, beams=10) for number in range(3)]
    assert "(3 refused: beam_width=10 beams run together, but max_num_seqs is 8)" in run_study(study, [*wide, request(3, 9)]).describe()
    long = [request(0, 9), request(1, 9000), request(2, 10_000)]
    assert "3 requests (2 refused: longer than 8,192 tokens)" in run_study(study, long).describe()
    assert "1 requests (0 refused)" in run_study(study, long[:1]).describe()


def test_runs_that_refuse_differently_are_told_apart() -> None:
    study = Study("chat", KNOWN_MODELS["llama-3.1-8b"], kv_memory="512MiB,1GiB", max_model_len=4096)
    said = run_study(study, [request(0, 9), request(1, 100, 1500, beams=4)]).describe()
    assert "(paged 512MiB: 1 refused: more than the KV memory's 4,096 tokens hold; paged 1GiB: 0 refused)" in said
