"""Stage 2 of 7: the order of requests, and queues kept in it. Before it: ``request``. After it: ``blocks``.

A policy ranks requests; the lower rank goes first everywhere: into the budget, out of the queue, and last into preemption.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from octavo.request import Request

Rank = tuple[float, ...]
Policy = Callable[[Request], Rank]


def fcfs(request: Request) -> Rank:
    """First come, first served; the samples of a request in their order."""
    return request.arrival_time, request.group_id, request.id


def priority(request: Request) -> Rank:
    """The lower priority value first; among equals, first come, first served."""
    return request.params.priority, request.arrival_time, request.group_id, request.id


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


class RequestQueue:
    """Requests sorted by rank. Finding one takes O(log n)."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.requests: list[Request] = []
        """In order, first one first; read only."""

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __contains__(self, request: Request) -> bool:
        index = self._index(request)
        return index < len(self.requests) and self.requests[index] is request

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        insort(self.requests, request, key=self.policy)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        index = self._index(request)
        assert self.requests[index] is request, f"request {request.id} is not in this queue"
        del self.requests[index]

    def _index(self, request: Request) -> int:
        return bisect_left(self.requests, self.policy(request), key=self.policy)
