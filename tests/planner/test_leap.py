"""Steps advanced together give what steps one by one give: every record to the bit, and every mean but for its rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from octavo.config import SchedulerConfig
from octavo.planner.latency_model import LinearLatency
from octavo.planner.replica import Replica, SimConfig
from octavo.planner.report import summarise, timeline
from octavo.planner.router import LeastLoaded
from octavo.planner.simulate import Fleet, SimResult, simulate
from octavo.planner.workload import WORKLOADS, SimRequest

LATENCY = LinearLatency(per_step=0.01, per_token=2e-5, per_context=1e-8)


def both(requests: list[SimRequest], replicas: int = 1, **settings: object) -> list[SimResult]:
    return [simulate(requests, SimConfig(leaps=leaps, **settings), LATENCY, replicas, "least_loaded") for leaps in (True, False)]  # type: ignore[arg-type]


def flat(figures: Mapping[str, Any], name: str = "") -> dict[str, float]:
    """Nested figures that are numbers as one level, so that they compare with a tolerance."""
    found: dict[str, float] = {}
    for key, value in figures.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}{key}.")
        elif isinstance(value, int | float):
            found[name + key] = value
    return found


def assert_same(leaping: SimResult, stepping: SimResult) -> None:
    by_id = [sorted(result.records, key=lambda r: r.request.id) for result in (leaping, stepping)]
    assert by_id[0] == by_id[1] and leaping.seconds == stepping.seconds
    assert flat(summarise(leaping)) == pytest.approx(flat(summarise(stepping)), rel=1e-9, abs=1e-12)
    for one, other in zip(timeline(leaping), timeline(stepping), strict=True):
        assert one.time == other.time
        assert one.running == pytest.approx(other.running, abs=0.05 * (1 + other.running))  # a span of time may begin within a leap
    assert sum(r.counts.num_leapt_steps for r in leaping.replicas) > 0 == sum(r.counts.num_leapt_steps for r in stepping.replicas)


@pytest.mark.parametrize("slots", [12_000, 200_000])
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize(("name", "rate"), [("chat", 8.0), ("code", 10.0), ("enterprise", 6.0)])
def test_leaps_change_nothing(name: str, rate: float, block_size: int, slots: int) -> None:
    requests = WORKLOADS[name].at_rate(rate).requests(60, seed=block_size)
    scheduler = SchedulerConfig(32, 512)
    leaping, stepping = both(requests, num_slots=slots, block_size=block_size, scheduler=scheduler)
    assert_same(leaping, stepping)


def test_leaps_change_nothing_in_a_fleet() -> None:
    requests = WORKLOADS["agent"].at_rate(20.0).requests(150)
    leaping, stepping = both(requests, 3, num_slots=30_000, max_model_len=16_384)
    assert_same(leaping, stepping)


def test_leaps_change_nothing_for_samples_that_share() -> None:
    requests = [replace(r, n=1 + r.id % 4) for r in WORKLOADS["rag"].at_rate(3.0).requests(30)]
    assert_same(*both(requests, num_slots=60_000))


def test_leaps_leave_the_same_tokens_behind() -> None:
    """What can be found in free blocks, in the order in which it will be lost. (Which block holds what may differ.)"""
    requests = WORKLOADS["chat"].at_rate(5.0).requests(60)
    left = []
    for leaps in (True, False):
        replica = Replica(0, SimConfig(9_000, leaps=leaps), LATENCY)
        Fleet([replica], LeastLoaded(1)).run(requests, replica.config)
        replica.core.check()
        entries = [replica.blocks._findable.get(block) for block in replica.blocks.pool.free_blocks()]
        left.append([None if entry is None else entry.tokens for entry in entries])
        assert replica.blocks.num_evictions > 0
    assert left[0] == left[1]
