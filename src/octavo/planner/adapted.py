"""A named workload with some of its figures replaced."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from octavo.errors import ConfigError
from octavo.planner.arrivals import Arrivals, Lengths
from octavo.planner.workload import Workload


def adapted(
    workload: Workload,
    *,
    rate: float | None = None,
    arrivals: str | None = None,
    arrival_cv: float | None = None,
    prompt_len: float | None = None,
    output_len: float | None = None,
    cancel: float | None = None,
) -> Workload:
    """The workload with another rate (requests a second), kind of arrivals, means of lengths (tokens) or share of requests given up.

    What is None stays. Raises ConfigError for figures out of range, and for a coefficient of variation of arrivals that have none.
    """
    for name, value in (("coefficient of variation", arrival_cv), ("mean prompt", prompt_len), ("mean output", output_len)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"the {name} must be a positive number, not {value}")
    if cancel is not None and not 0 <= cancel <= 1:
        raise ConfigError(f"the share of requests that are given up must be from 0 to 1, not {cancel}")
    return replace(
        workload,
        arrivals=_arrivals(workload.arrivals, rate, arrivals, arrival_cv),
        prompt=_with_mean(workload.prompt, prompt_len),
        output=_with_mean(workload.output, output_len),
        cancelled=workload.cancelled if cancel is None else cancel,
    )


def _arrivals(own: Arrivals, rate: float | None, kind: str | None, cv: float | None) -> Arrivals:
    changes: dict[str, Any] = {name: value for name, value in (("rate", rate), ("kind", kind), ("cv", cv)) if value is not None}
    found = replace(own, **changes)
    if cv is not None and found.kind != "gamma":
        raise ConfigError(f"{found.kind} arrivals have no coefficient of variation to set; choose gamma")
    return found


def _with_mean(lengths: Lengths, mean: float | None) -> Lengths:
    """The same shape with another mean; its upper cut moves along where the mean grows."""
    if mean is None:
        return lengths
    return replace(lengths, mean=mean, high=max(lengths.high, round(lengths.high * mean / lengths.mean)))
