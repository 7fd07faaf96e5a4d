"""Draws have the rates and means that they claim, and are the same for the same seed."""

from __future__ import annotations

import random
from itertools import islice
from statistics import fmean, pstdev

import pytest

from octavo.errors import ConfigError
from octavo.planner.arrivals import Arrivals, Lengths


@pytest.mark.parametrize("rate", [0.5, 40.0])
@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 0.5), ("gamma", 3.0), ("even", 0.0), ("bursts", None)])
def test_arrivals_have_the_rate_and_the_spread_they_claim(kind: str, cv: float | None, rate: float) -> None:
    count = 20_000
    arrivals = Arrivals(kind, rate, cv=cv or 2.0, burst=20 / rate, peak=4.0)  # type: ignore[arg-type]
    times = list(islice(arrivals.times(random.Random(1)), count))
    assert times == sorted(times)
    # The gaps' own standard error: cv / sqrt(count), times 4; a burst process is as uneven as whole bursts.
    assert count / times[-1] == pytest.approx(rate, rel=4 * max(cv or 5.0, 0.001) / count**0.5)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    if cv is not None:
        assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.1, abs=1e-6)
    else:
        assert pstdev(gaps) / fmean(gaps) > 2


def test_bursts_are_silent_between_bursts() -> None:
    arrivals = Arrivals("bursts", 10.0, burst=5.0, peak=2.0)
    times = list(islice(arrivals.times(random.Random(0)), 2000))
    assert all(time % 10.0 <= 5.0 for time in times)


def test_at_once_is_at_once() -> None:
    assert list(islice(Arrivals("at_once").times(random.Random(0)), 3)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["lognormal", "gamma", "fixed"])
def test_lengths_have_the_mean_and_spread_they_claim(kind: str) -> None:
    lengths = Lengths(kind, 400.0, 0.8)  # type: ignore[arg-type]
    chance = random.Random(2)
    drawn = [lengths.draw(chance) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(400, rel=0.03)
    assert pstdev(drawn) / fmean(drawn) == pytest.approx(0.0 if kind == "fixed" else 0.8, rel=0.1)


def test_lengths_stay_within_their_bounds() -> None:
    chance = random.Random(3)
    for kind in ("lognormal", "gamma", "uniform"):
        drawn = {Lengths(kind, 10, 3.0, low=4, high=12).draw(chance) for _ in range(2000)}  # type: ignore[arg-type]
        assert drawn == set(range(4, 13))


@pytest.mark.parametrize("bad", [{"kind": "weekly"}, {"rate": 0}, {"rate": float("inf")}, {"cv": 0}, {"peak": 0.5}])
def test_impossible_arrivals_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Arrivals(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [{"kind": "pareto"}, {"mean": 0}, {"low": 5, "high": 4}, {"low": 0}])
def test_impossible_lengths_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Lengths(**bad)  # type: ignore[arg-type]
