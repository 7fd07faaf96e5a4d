"""Memory over time against sums over a fine grid; and the memory of a fleet against that of its replicas."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.planner.accounting import Usage
from octavo.planner.latency_model import LinearLatency
from octavo.planner.replica import SimConfig
from octavo.planner.report import timeline
from octavo.planner.simulate import simulate
from octavo.planner.timeline import POINTS, Timeline, together
from octavo.planner.workload import WORKLOADS


def usage(total: int, used: int) -> Usage:
    return Usage(total, used, 0, 0, 0, total - used)


@given(st.integers(0, 10**6), st.sampled_from([0.001, 0.1, 40.0]))
@settings(max_examples=30, deadline=None)
def test_a_timeline_keeps_what_it_is_given(seed: int, longest: float) -> None:
    chance, line, now = random.Random(seed), Timeline(), 0.0
    steps = []
    for _ in range(chance.randint(1, 300)):
        now += chance.choice([0.0, 0.0, longest * 3])  # nothing to do
        seconds, used = chance.uniform(longest / 100, longest), chance.randint(0, 100)
        line.add(now, seconds, used % 7, usage(100, used))
        steps.append((now, now + seconds, used))
        now += seconds
    moments = line.moments()
    assert len(moments) <= POINTS and line.end == pytest.approx(now)
    for index, moment in enumerate(moments):
        begin, end = index * line.width, min((index + 1) * line.width, line.end)
        held = sum(max(0.0, min(end, b) - max(begin, a)) * used for a, b, used in steps)
        assert moment.shares["used"] == pytest.approx(held / (end - begin) / 100, abs=1e-6)
        assert sum(moment.shares.values()) == pytest.approx(1)


def test_a_fleet_holds_what_its_replicas_hold() -> None:
    lines = []
    for used, seconds in ((40, 1.0), (10, 3.0)):
        lines.append(Timeline())
        for step in range(20):
            lines[-1].add(step * seconds, seconds, 1, usage(100, used))
    moments = together(lines).moments()
    for moment in moments:
        if abs(moment.time - 20) > 1:  # one of them ends at 20, and its memory is free then
            assert moment.shares["used"] == pytest.approx(0.25 if moment.time < 20 else 0.05)


def test_the_memory_of_all_replicas_is_shown() -> None:
    result = simulate(WORKLOADS["rag"].at_rate(8.0).requests(60), SimConfig(30_000), LinearLatency(per_step=0.02, per_token=1e-5), 3)
    used = sum(m.shares["used"] for m in timeline(result)) / len(timeline(result))
    slot_seconds = sum(r.counts.every.sums[1] for r in result.replicas)
    assert used == pytest.approx(slot_seconds / (3 * 30_000 * result.seconds), rel=0.02)
