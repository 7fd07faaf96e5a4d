"""Replicas that have nothing to do with each other, shared out to several processes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from octavo.planner.latency_model import LatencyModel
from octavo.planner.replica import Record, Replica, ReplicaFigures, SimConfig
from octavo.planner.simulate import Fleet, SimResult
from octavo.planner.workload import SimRequest
from octavo.request import RequestMetrics

PARTS_PER_PROCESS = 4
"""So that those that have finished take from those that have not."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Everything that is to be done; a forked process has it without a copy being sent."""

    requests: Sequence[SimRequest]
    homes: list[int]
    """The replica of each request."""
    config: SimConfig
    latency: LatencyModel
    num_replicas: int
    num_parts: int


class _Ended(NamedTuple):
    """A record without its request, which the other side has."""

    request_id: int
    replica: int
    arrival: float
    metrics: RequestMetrics | None
    num_output: int
    reason: str
    refusal: str


class _Part(NamedTuple):
    """What came out of one part."""

    ended: list[_Ended]
    figures: list[ReplicaFigures]
    start: float
    end: float


class _Homes:
    """The router of a part: every ``num_parts``-th replica is here, so home ``h`` is at place ``h // num_parts``."""

    def __init__(self, places: dict[int, int]) -> None:
        self._places = places

    def homes(self, requests: Sequence[SimRequest]) -> list[int] | None:
        return [self._places[request.id] for request in requests]

    def choose(self, request: SimRequest) -> int:
        return self._places[request.id]

    def ended(self, request: SimRequest, replica: int) -> None:
        pass


_work: _Work
"""What the processes of a pool work on."""


def _begin(work: _Work) -> None:
    global _work  # noqa: PLW0603
    _work = work


def _run(part: int) -> _Part:
    w = _work
    mine = [(request, home // w.num_parts) for request, home in zip(w.requests, w.homes, strict=True) if home % w.num_parts == part]
    replicas = [Replica(index, w.config, w.latency) for index in range(part, w.num_replicas, w.num_parts)]
    result = Fleet(replicas, _Homes({request.id: place for request, place in mine})).run([request for request, _ in mine], w.config)
    ended = [_Ended(r.request.id, r.replica, r.arrival, r.metrics, r.num_output, r.reason, r.refusal) for r in result.records]
    return _Part(ended, result.replicas, result.start, result.end)


def simulate_apart(
    requests: Sequence[SimRequest], config: SimConfig, latency: LatencyModel, homes: list[int], num_replicas: int, processes: int
) -> SimResult:
    """Run requests at the replicas that are their ``homes``. Records of the same moment stand in the order of their replicas."""
    num_parts = min(num_replicas, PARTS_PER_PROCESS * processes)
    work = _Work(requests, homes, config, latency, num_replicas, num_parts)
    with ProcessPoolExecutor(processes, initializer=_begin, initargs=(work,)) as pool:
        parts = list(pool.map(_run, range(num_parts)))
    known = {request.id: request for request in requests}
    records = [Record(known[ended.request_id], *ended[1:]) for part in parts for ended in part.ended]
    records.sort(key=lambda r: (_end(r), r.replica))
    figures = [parts[index % num_parts].figures[index // num_parts] for index in range(num_replicas)]
    busy = [part for part in parts if part.ended]
    return SimResult(config, records, figures, min(p.start for p in busy), max(p.end for p in busy))


def _end(record: Record) -> float:
    finish = record.metrics.finish_time if record.metrics is not None else None
    return record.arrival if finish is None else finish
