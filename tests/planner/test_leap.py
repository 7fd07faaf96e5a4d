"""Steps advanced together give what steps one by one give: to the bit, in every figure."""

from __future__ import annotations

import pytest

from octavo.config import SchedulerConfig
from octavo.planner.latency_model import LinearLatency
from octavo.planner.replica import SimConfig
from octavo.planner.report import summarise, timeline
from octavo.planner.simulate import SimResult, simulate
from octavo.planner.workload import WORKLOADS, SimRequest

LATENCY = LinearLatency(per_step=0.01, per_token=2e-5, per_context=1e-8)


def both(requests: list[SimRequest], replicas: int = 1, **settings: object) -> list[SimResult]:
    return [simulate(requests, SimConfig(leaps=leaps, **settings), LATENCY, replicas, "least_loaded") for leaps in (True, False)]  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [12_000, 200_000])
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize(("name", "rate"), [("chat", 8.0), ("code", 10.0), ("enterprise", 6.0)])
def test_leaps_change_nothing(name: str, rate: float, block_size: int, slots: int) -> None:
    requests = WORKLOADS[name].at_rate(rate).requests(60, seed=block_size)
    scheduler = SchedulerConfig(32, 512)
    leaping, stepping = both(requests, num_slots=slots, block_size=block_size, scheduler=scheduler)
    assert leaping.records == stepping.records and leaping.seconds == stepping.seconds
    assert summarise(leaping) == summarise(stepping)
    assert timeline(leaping) == timeline(stepping)
    assert leaping.replicas[0].runner.num_leapt_steps > 0 == stepping.replicas[0].runner.num_leapt_steps
    for replica in leaping.replicas:
        replica.core.check()


def test_leaps_change_nothing_in_a_fleet() -> None:
    requests = WORKLOADS["agent"].at_rate(20.0).requests(150)
    leaping, stepping = both(requests, 3, num_slots=30_000, max_model_len=16_384)
    assert sorted(leaping.records, key=lambda r: r.request.id) == sorted(stepping.records, key=lambda r: r.request.id)
    assert summarise(leaping) == summarise(stepping)


def test_leaps_leave_the_same_blocks_behind() -> None:
    requests = WORKLOADS["chat"].at_rate(5.0).requests(40)
    pools = [result.replicas[0].blocks.pool.free_blocks() for result in both(requests, num_slots=40_000)]
    assert pools[0] == pools[1]
