"""Stage 2 of 7: all requests, by what they wait for. Before it: ``request``. After it: ``policies``."""

from __future__ import annotations

from collections.abc import Callable

from octavo.request import Request
from octavo.scheduler.beam_search import BeamSearch
from octavo.scheduler.policies import Policy, RequestQueue


class Queues:
    """Every request is in one of three queues; one with beams stands for all of them."""

    def __init__(self, policy: Policy) -> None:
        self.waiting = RequestQueue(policy)
        self.running = RequestQueue(policy)
        self.preempted = RequestQueue(policy)
        self.searches: dict[int, BeamSearch] = {}
        """Beam searches, by the id of their request."""

    @property
    def num_running(self) -> int:
        """Requests that run, each sample and each beam for itself."""
        return len(self.running) + self._sum_searches(lambda search: len(search.beams) - 1)

    @property
    def num_rows(self) -> int:
        """Rows of the runner that are taken, or kept for beams to come."""
        return len(self.running) + self._sum_searches(lambda search: search.request.num_rows - 1)

    def _sum_searches(self, more: Callable[[BeamSearch], int]) -> int:
        return sum(more(search) for search in self.searches.values() if search.request in self.running) if self.searches else 0

    def parts(self, request: Request) -> list[Request]:
        """Whose tokens and blocks stand behind a request in a queue: its own, or its beams'."""
        search = self.searches.get(request.id)
        return [request] if search is None else search.beams
