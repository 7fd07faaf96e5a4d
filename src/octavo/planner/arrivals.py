"""When requests arrive and how long they are: seeded random draws with stated means. Times in seconds, lengths in tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process with ``rate`` requests a second in the long run.

    - ``poisson``: independent gaps, exponential.
    - ``gamma``: independent gaps with coefficient of variation ``cv``; above 1 they come in clumps, below 1 evenly.
    - ``bursts``: ``burst`` seconds at ``peak`` times the rate, then a pause that makes the mean right; Poisson within a burst.
    - ``even``: equal gaps.
    - ``at_once``: all at time 0; the rate is ignored.
    """

    kind: Literal["poisson", "gamma", "bursts", "even", "at_once"] = "poisson"
    rate: float = 1.0
    cv: float = 2.0
    burst: float = 10.0
    peak: float = 4.0

    def __post_init__(self) -> None:
        _require(self.kind in _GAPS, f"arrivals {self.kind!r} are not known; choose one of {', '.join(_GAPS)}")
        _require(self.rate > 0 and math.isfinite(self.rate), f"the rate of arrivals must be a positive number, not {self.rate}")
        _require(self.cv > 0, f"cv must be positive, not {self.cv}")
        _require(self.burst > 0 and self.peak >= 1, f"burst must be positive and peak at least 1, not {self.burst} and {self.peak}")

    def times(self, chance: random.Random) -> Iterator[float]:
        """Arrival times from 0 on, without end."""
        return _GAPS[self.kind](self, chance)


def _renewal(gap: str, arrivals: Arrivals, chance: random.Random) -> Iterator[float]:
    time, mean = 0.0, 1 / arrivals.rate
    shape = 1 / arrivals.cv**2
    while True:
        if gap == "gamma":
            time += chance.gammavariate(shape, mean / shape)
        else:
            time += mean if gap == "even" else chance.expovariate(arrivals.rate)
        yield time


def _bursts(arrivals: Arrivals, chance: random.Random) -> Iterator[float]:
    """Poisson at the peak rate, on a clock that runs only during bursts.

    clock of bursts   |-burst-|-burst-|          busy = k * burst + rest
    time              |-burst-|.......|-burst-|  time = k * burst * peak + rest
    """
    busy = 0.0
    while True:
        busy += chance.expovariate(arrivals.rate * arrivals.peak)
        number, rest = divmod(busy, arrivals.burst)
        yield number * arrivals.burst * arrivals.peak + rest


def _at_once(arrivals: Arrivals, chance: random.Random) -> Iterator[float]:
    while True:
        yield 0.0


_GAPS = {
    "poisson": lambda a, chance: _renewal("poisson", a, chance),
    "gamma": lambda a, chance: _renewal("gamma", a, chance),
    "even": lambda a, chance: _renewal("even", a, chance),
    "bursts": _bursts,
    "at_once": _at_once,
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths: ``mean`` before it is cut to ``low`` .. ``high``.

    - ``lognormal``: long-tailed; ``cv`` is the coefficient of variation.
    - ``gamma``: the same parameters, a shorter tail.
    - ``uniform``: from ``low`` to ``high``; mean and cv are ignored.
    - ``fixed``: the mean, always.
    """

    kind: Literal["lognormal", "gamma", "uniform", "fixed"] = "lognormal"
    mean: float = 256.0
    cv: float = 1.0
    low: int = 1
    high: int = 131_072

    def __post_init__(self) -> None:
        kinds = ("lognormal", "gamma", "uniform", "fixed")
        _require(self.kind in kinds, f"lengths {self.kind!r} are not known; choose one of {', '.join(kinds)}")
        _require(self.mean > 0 and self.cv > 0, f"mean and cv of lengths must be positive, not {self.mean} and {self.cv}")
        _require(1 <= self.low <= self.high, f"lengths must have 1 <= low <= high, not {self.low} and {self.high}")

    def draw(self, chance: random.Random) -> int:
        """One length, at least 1."""
        if self.kind == "uniform":
            return chance.randint(self.low, self.high)
        value = self.mean
        if self.kind == "gamma":
            shape = 1 / self.cv**2
            value = chance.gammavariate(shape, self.mean / shape)
        elif self.kind == "lognormal":
            sigma = math.sqrt(math.log1p(self.cv**2))
            value = chance.lognormvariate(math.log(self.mean) - sigma**2 / 2, sigma)
        return max(self.low, min(self.high, round(value)))


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)
