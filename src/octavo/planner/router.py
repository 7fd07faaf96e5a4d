"""Which replica a request goes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from octavo.errors import ConfigError
from octavo.planner.workload import SimRequest


class Router(Protocol):
    """Chooses replicas; told when requests end. It knows what a router knows: what it sent where, and what came back."""

    def choose(self, request: SimRequest) -> int:
        """The replica for a request that arrives now."""

    def ended(self, request: SimRequest, replica: int) -> None:
        """A request has ended there."""


class RoundRobin:
    """One after another."""

    def __init__(self, num_replicas: int) -> None:
        self._num, self._next = num_replicas, 0

    def choose(self, request: SimRequest) -> int:
        chosen, self._next = self._next, (self._next + 1) % self._num
        return chosen

    def ended(self, request: SimRequest, replica: int) -> None:
        pass


class LeastLoaded:
    """The replica with the fewest prompt tokens outstanding; among equals the first."""

    def __init__(self, num_replicas: int) -> None:
        self.load = [0] * num_replicas

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


ROUTERS: dict[str, Callable[[int], Router]] = {"round_robin": RoundRobin, "least_loaded": LeastLoaded, "prefix_aware": PrefixAware}


def named_router(name: str, num_replicas: int) -> Router:
    """A router by its name. Raises ConfigError with the list."""
    if name not in ROUTERS:
        raise ConfigError(f"router {name!r} is not known; choose one of {', '.join(ROUTERS)}")
    return ROUTERS[name](num_replicas)
