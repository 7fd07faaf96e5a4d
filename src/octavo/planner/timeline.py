"""Memory over time, of one engine or of many: means over equal spans of time, however long a run takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.planner.accounting import Usage

POINTS = 256
"""Most spans that are kept."""
NUM_SUMS = 6
"""Of each span; see ``Timeline.spans``."""


class Moment(NamedTuple):
    """Means over one span."""

    time: float
    """Its middle."""
    running: float
    """Requests that run."""
    shares: dict[str, float]
    """Of all slots, by kind."""
    shared: float
    """Slots that would be used beside them if no block had two owners, as a share of all."""


class Timeline:
    """Sums over spans of ``width`` seconds from time 0 on. When they become too many, each two become one.

    A span in which an engine does nothing for a while counts that while as free memory.
    """

    def __init__(self) -> None:
        self.width = 2.0**-10
        self.end = 0.0
        """Of the last step."""
        self.num_slots = 0.0
        self.spans: list[list[float]] = []
        """seconds times running requests, used, reserved, internal, external and shared slots."""

    def add(self, begin: float, seconds: float, running: int, slots: Usage) -> None:
        """Count a step, or several, by the spans in which they lie."""
        self.num_slots = slots.total
        self.end = max(self.end, begin + seconds)
        while self.end >= self.width * POINTS:
            self._halve()
        index = int(begin / self.width)
        while len(self.spans) * self.width <= self.end:
            self.spans.append([0.0] * NUM_SUMS)
        counts = (running, slots.used, slots.reserved, slots.internal, slots.external, slots.shared)
        while seconds > 0:
            part = min(seconds, (index + 1) * self.width - begin)
            span = self.spans[index]
            for place, count in enumerate(counts):
                span[place] += part * count
            begin, seconds, index = begin + part, seconds - part, index + 1

    def _halve(self) -> None:
        if len(self.spans) % 2:
            self.spans.append([0.0] * NUM_SUMS)
        pairs = zip(self.spans[::2], self.spans[1::2], strict=True)
        self.spans = [[a + b for a, b in zip(one, other, strict=True)] for one, other in pairs]
        self.width *= 2

    def moments(self) -> list[Moment]:
        """All spans in order."""
        found = []
        for index, (running, used, reserved, internal, external, shared) in enumerate(self.spans):
            begin = index * self.width
            seconds = min(self.width, self.end - begin)
            if seconds <= 0:
                break
            slots = seconds * self.num_slots
            shares = {"used": used / slots, "reserved": reserved / slots, "internal": internal / slots, "external": external / slots}
            found.append(
                Moment(begin + seconds / 2, running / seconds, shares | {"free": max(0.0, 1.0 - sum(shares.values()))}, shared / slots)
            )
        return found


def together(timelines: Sequence[Timeline]) -> Timeline:
    """The memory of several engines as one. The timelines themselves become coarser."""
    whole = Timeline()
    whole.width = max((t.width for t in timelines), default=whole.width)
    whole.end = max((t.end for t in timelines), default=0.0)
    whole.num_slots = sum(t.num_slots for t in timelines)
    for timeline in timelines:
        while timeline.width < whole.width:
            timeline._halve()
        while len(whole.spans) < len(timeline.spans):
            whole.spans.append([0.0] * NUM_SUMS)
        for total, span in zip(whole.spans, timeline.spans, strict=False):
            for place, value in enumerate(span):
                total[place] += value
    return whole
