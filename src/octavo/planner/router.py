"""Which replica a request goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.errors import ConfigError
from octavo.planner.workload import SimRequest


class Router(Protocol):
    """Chooses replicas; told when requests end. It knows what a router knows: what it sent where, and what came back."""

    def homes(self, requests: Sequence[SimRequest]) -> list[int] | None:
        """The replica that ``choose`` will choose for each request, where no answers are needed to tell; else None."""

    def choose(self, request: SimRequest) -> int:
        """The replica for a request that arrives now."""

    def ended(self, request: SimRequest, replica: int) -> None:
        """A request has ended there."""


class RoundRobin:
    """One after another."""

    def __init__(self, num_replicas: int) -> None:
        self._num, self._next = num_replicas, 0

    def homes(self, requests: Sequence[SimRequest]) -> list[int] | None:
        if any(request.follows is not None for request in requests):
            return None  # when a next turn arrives, the answers tell
        return _in_turn(requests, self._num)

    def choose(self, request: SimRequest) -> int:
        chosen, self._next = self._next, (self._next + 1) % self._num
        return chosen

    def ended(self, request: SimRequest, replica: int) -> None:
        pass


class Sticky:
    """Conversations one after another; all turns of one stay at a replica, which has what was said before in its cache."""

    def __init__(self, num_replicas: int) -> None:
        self._num, self._next = num_replicas, 0
        self._home: dict[int, int] = {}

    def homes(self, requests: Sequence[SimRequest]) -> list[int] | None:
        begins = [request for request in requests if request.follows is None]
        home = {request.id: place for request, place in zip(begins, _in_turn(begins, self._num), strict=True)}
        for request in requests:
            if request.follows is not None:
                home[request.id] = home[request.follows]
        return [home[request.id] for request in requests]

    def choose(self, request: SimRequest) -> int:
        if request.follows is not None:
            chosen = self._home.pop(request.follows)
        else:
            chosen, self._next = self._next, (self._next + 1) % self._num
        self._home[request.id] = chosen
        return chosen

    def ended(self, request: SimRequest, replica: int) -> None:
        pass


def _in_turn(requests: Sequence[SimRequest], num_replicas: int) -> list[int]:
    """Replicas by order of arrival, one after another."""
    homes = [0] * len(requests)
    for place, index in enumerate(sorted(range(len(requests)), key=lambda index: requests[index].arrival)):
        homes[index] = place % num_replicas
    return homes


class LeastLoaded:
    """The replica with the fewest prompt tokens outstanding; among equals the first."""

    def __init__(self, num_replicas: int) -> None:
        self.load = [0] * num_replicas

    def homes(self, requests: Sequence[SimRequest]) -> list[int] | None:
        return None

    def choose(self, request: SimRequest) -> int:
        chosen = min(range(len(self.load)), key=self.load.__getitem__)
        self.load[chosen] += request.prompt_len
        return chosen

    def ended(self, request: SimRequest, replica: int) -> None:
        self.load[replica] -= request.prompt_len


class PrefixAware(LeastLoaded):
    """The replica that last had the longest beginning of the prompt, unless it has ``slack`` times the mean load and more; else the least loaded."""

    def __init__(self, num_replicas: int, slack: float = 2.0) -> None:
        super().__init__(num_replicas)
        self._slack = slack
        self._home: dict[int, int] = {}

    def choose(self, request: SimRequest) -> int:
        heads = [hash(request.prompt[:end]) for end in range(len(request.prompt), 0, -1)]
        chosen = next((self._home[head] for head in heads if head in self._home), None)
        limit = self._slack * (sum(self.load) / len(self.load) + request.prompt_len)
        if chosen is None or self.load[chosen] > limit:
            chosen = super().choose(request)
        else:
            self.load[chosen] += request.prompt_len
        self._home.update(dict.fromkeys(heads, chosen))
        return chosen


ROUTERS: dict[str, Callable[[int], Router]] = {
    "round_robin": RoundRobin,
    "sticky": Sticky,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
}


def named_router(name: str, num_replicas: int) -> Router:
    """A router by its name. Raises ConfigError with the list, and for fewer replicas than one."""
    if num_replicas < 1:
        raise ConfigError(f"a fleet has at least 1 replica, not {num_replicas}")
    if name not in ROUTERS:
        raise ConfigError(f"router {name!r} is not known; choose one of {', '.join(ROUTERS)}")
    return ROUTERS[name](num_replicas)
