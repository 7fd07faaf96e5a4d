"""Runs a workload through simulated engines behind a router, event by event.

Events at the same time happen in this order, so that a step sees all that has arrived when it begins:

    0  a step ends: its answers are given     1  requests arrive     2  callers give up     3  steps begin
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from octavo.planner.latency_model import LatencyModel
from octavo.planner.replica import Record, Replica, ReplicaFigures, SimConfig
from octavo.planner.router import Router, named_router
from octavo.planner.workload import SimRequest

STEP_ENDS, ARRIVES, GIVES_UP, STEP_BEGINS = range(4)


@dataclass(frozen=True, slots=True)
class SimResult:
    """What a simulation gave."""

    config: SimConfig
    records: list[Record]
    """One for each request, in the order in which they ended."""
    replicas: list[ReplicaFigures]
    start: float
    """Virtual time of the first arrival, and ..."""
    end: float
    """... of the last answer."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


def simulate(
    requests: Sequence[SimRequest],
    config: SimConfig,
    latency: LatencyModel,
    num_replicas: int = 1,
    router: str | Router = "round_robin",
    processes: int = 1,
) -> SimResult:
    """Run requests to their ends. Raises ConfigError for settings that cannot work.

    Replicas are shared out to ``processes`` where the router needs no answers to choose among them; that changes no result.
    """
    chosen = named_router(router, num_replicas) if isinstance(router, str) else router
    homes = chosen.homes(requests) if min(processes, num_replicas) > 1 else None
    if homes is not None:
        from octavo.planner.processes import simulate_apart

        return simulate_apart(requests, config, latency, homes, num_replicas, processes)
    return Fleet([Replica(i, config, latency) for i in range(num_replicas)], chosen).run(requests, config)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Garbage in cycles stays: there is hardly any, and to look for it among millions of objects takes a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Fleet:
    """Replicas, their router, and the events to come."""

    def __init__(self, replicas: list[Replica], router: Router) -> None:
        self.replicas = replicas
        self.router = router
        self.records: list[Record] = []
        self.order: list[tuple[float, int]] = []
        """(time, kind) of the last events, for tests; kept only where ``keep_order``."""
        self.keep_order = False
        self._events: list[tuple[float, int, int, Any]] = []
        self._num_events = 0
        self._last_end = 0.0
        self._ending: dict[int, list[Record]] = {}
        self._ends: dict[int, float] = {}
        """When the step or leap that runs now ends, by replica."""
        self._where: dict[int, Replica] = {}
        self._followers: dict[int, list[SimRequest]] = {}

    def run(self, requests: Sequence[SimRequest], config: SimConfig) -> SimResult:
        """Let all events happen."""
        for request in requests:
            if request.follows is None:
                self._push(request.arrival, ARRIVES, request)
            else:
                self._followers.setdefault(request.follows, []).append(request)
        start = self._last_end = min((request.arrival for request in requests if request.follows is None), default=0.0)
        handlers = (self._step_ends, self._arrives, self._gives_up, self._step_begins)
        with _no_collections():
            while self._events:
                now, kind, _, what = heappop(self._events)
                if self.keep_order:
                    self.order.append((now, kind))
                handlers[kind](now, what)
        left = {r.id for r in requests} - {record.request.id for record in self.records}
        assert not left, f"requests {sorted(left)[:5]} have no end"
        return SimResult(config, self.records, [replica.figures() for replica in self.replicas], start, self._last_end)

    def _push(self, time: float, kind: int, what: Any) -> None:
        heappush(self._events, (time, kind, self._num_events, what))
        self._num_events += 1

    def _arrives(self, now: float, request: SimRequest) -> None:
        replica = self.replicas[self.router.choose(request)]
        refused = replica.submit(request, now)
        if refused is not None:
            self._take([refused], now)
            return
        if request.cancel_after is not None:
            self._where[request.id] = replica
            self._push(now + request.cancel_after, GIVES_UP, request)
        self._cut(replica, now)
        self._wake(replica, now)

    def _wake(self, replica: Replica, now: float) -> None:
        if not replica.busy:
            replica.busy = True
            self._push(now, STEP_BEGINS, replica)

    def _step_begins(self, now: float, replica: Replica) -> None:
        if not replica.core.has_work:
            replica.busy = False
            return
        end = replica.begin_leap(now)
        if end is None:
            self._ending[replica.index] = replica.step(now)
            end = replica.clock.now
        else:
            self._ending[replica.index] = []
        self._ends[replica.index] = end
        self._push(end, STEP_ENDS, replica)

    def _cut(self, replica: Replica, now: float) -> None:
        """Let a leap end with the step that runs now."""
        end = replica.cut_leap(now)
        if end is not None and end < self._ends[replica.index]:
            self._ends[replica.index] = end
            self._push(end, STEP_ENDS, replica)

    def _step_ends(self, now: float, replica: Replica) -> None:
        if self._ends.get(replica.index) != now:
            return  # a leap that was cut short has ended before
        del self._ends[replica.index]
        replica.end_leap()
        self._take(self._ending.pop(replica.index), now)
        replica.busy = False
        if replica.core.has_work:
            self._wake(replica, now)

    def _gives_up(self, now: float, request: SimRequest) -> None:
        """As in the engine, between two steps: one that runs now is not cut short."""
        replica = self._where[request.id]
        if replica.index in self._ending:
            self._cut(replica, now)
            self._push(self._ends[replica.index], GIVES_UP, request)
            return
        del self._where[request.id]
        self._take(replica.cancel(request.id, now), now)

    def _take(self, records: list[Record], now: float) -> None:
        """Give answers: the router hears of them, and conversations go on."""
        if records:
            self._last_end = now
        for record in records:
            self.records.append(record)
            self.router.ended(record.request, record.replica)
            for follower in self._followers.pop(record.request.id, ()):
                self._push(now + follower.arrival, ARRIVES, follower)
