"""Decode steps in which nothing is decided, advanced together, with the result of taking them one by one.

Where each running request computes one token and nobody can be admitted, the next steps are alike until a request ends, the free
blocks are used up, or somebody arrives or gives up. Only two moments of a request matter meanwhile:

    slots   | . . . . | . . . x |       its last slot fills: the block becomes findable
            | . . . . | . . . . | x     its blocks are full: a new one is handed out

Blocks that are handed out are as good as one another as long as each loses no more than what was found in itself
(``BlockManager.num_plain``), so each request gets its blocks at once; in the order in which their first blocks fill, since that is
the order in which blocks with the same parent are looked at.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from itertools import accumulate, cycle, islice
from operator import mul

from octavo.planner.accounting import Usage
from octavo.planner.latency_model import LatencyModel
from octavo.request import split_id
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step import StepPlan


class LeapingScheduler(Scheduler):
    """The scheduler, and a way to move all running requests on by several steps."""

    def admits_nobody(self, plan: StepPlan) -> bool:
        """Whether the step just committed was plain decoding, though requests wait: so will the next one be."""
        running = len(self._queues.running)
        return running == plan.num_requests == plan.num_tokens == sum(plan.sampled) and not plan.admitted and not plan.preempted

    def num_alike(self) -> int:
        """Steps until one ends a request, lacks a block or does more than to decode; that one is not counted."""
        running, size = self._queues.running.requests, self.blocks.block_size
        if not running or self._queues.preempted or self._queues.searches:
            return 0
        if any(r.num_computed != len(r.token_ids) - 1 or r.num_samples > 1 for r in running):
            return 0
        low, high = 0, min(r.max_tokens - r.num_output for r in running) - 1
        held = sum(-(-r.num_computed // size) for r in running)

        def needed(num_steps: int) -> int:
            return sum(-(-(r.num_computed + num_steps) // size) for r in running) - held

        free = self.blocks.num_plain(needed(high)) if high > 0 else 0
        if needed(high) <= free:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if needed(middle) <= free else (low, middle)
        return low

    def advance(self, num_steps: int, outputs: Mapping[int, int]) -> None:
        """Take ``num_steps`` steps. ``outputs`` tells each request's next tokens."""
        size = self.blocks.block_size
        for request in sorted(self._queues.running.requests, key=lambda r: -(r.num_computed + 1) % size):
            request.token_ids.extend(array("i", [outputs[request.id]]) * num_steps)
            request.num_computed += num_steps
            new = self.blocks.reserve(request.id, request.num_computed)
            assert new is not None, "a block is lacking in a step that was counted as alike"
        self.blocks.end_step()
        self._step += num_steps

    def running(self) -> list[tuple[int, int]]:
        """(id, tokens computed) of each running request, in order."""
        return [(request.id, request.num_computed) for request in self._queues.running.requests]


class Leap:
    """Steps on their way: when each begins, and how many of them will be taken."""

    def __init__(self, now: float, num_steps: int, scheduler: LeapingScheduler, latency: LatencyModel) -> None:
        running = scheduler.running()
        rows, first = len(running), sum(computed + 1 for _, computed in running)
        self.num_steps = num_steps
        self.seconds = latency.decodes(rows, range(first, first + num_steps * rows, rows))
        self.begins = list(accumulate(self.seconds, initial=now))
        """Of each step, and the end of the last one."""
        self.waiting = scheduler.num_waiting > 0
        """Whether requests wait, all the time."""

    @property
    def end(self) -> float:
        return self.begins[self.num_steps]

    def cut(self, now: float) -> None:
        """Take no step that begins at ``now`` or later, but the first."""
        while self.num_steps > 1 and self.begins[self.num_steps - 1] >= now:
            self.num_steps -= 1


SPAN = 64
"""Steps of a leap that are accounted for together."""


class LeapUsage:
    """Slots by kind during a leap, worked out from the moments at which blocks are handed out.

    A request gets one in every ``block_size``-th step. The last one that it will need brings slots that will never be used.
    """

    def __init__(self, leap: Leap, scheduler: LeapingScheduler, slots: Usage, final_tokens: Mapping[int, int]) -> None:
        """``slots`` are those between the last step and the first one of the leap."""
        running, size, num_steps = scheduler.running(), scheduler.blocks.block_size, leap.num_steps
        self._leap, self._slots, self._size, self._rows = leap, slots, size, len(running)
        grows, self._wastes = [0] * size, dict[int, int]()
        for request_id, start in running:
            grows[-start % size] += 1
            final = final_tokens[split_id(request_id)[0]]
            last = (final - 1) // size * size - start
            if 0 <= last < num_steps:
                self._wastes[last] = self._wastes.get(last, 0) + -final % size
        self._handed = list(accumulate(islice(cycle(grows), num_steps)))
        """Blocks handed out up to and in each step."""
        held = sum(scheduler.blocks.num_held(request_id) for request_id, _ in running)
        self.num_table_entries = held * num_steps + sum(self._handed)
        """Summed over the steps."""

    def spans(self) -> Iterator[tuple[float, float, Usage]]:
        """(begin, seconds, mean slots) of each few steps."""
        wasted = 0.0
        for start in range(0, self._leap.num_steps, SPAN):
            end = min(start + SPAN, self._leap.num_steps)
            seconds = self._leap.seconds[start:end]
            total = sum(seconds)
            internal = wasted + sum(
                slots * sum(seconds[step - start :]) / total for step, slots in self._wastes.items() if start <= step < end
            )
            wasted += sum(slots for step, slots in self._wastes.items() if start <= step < end)
            yield self._leap.begins[start], total, self._mean(start, end, seconds, total, internal)

    def _mean(self, start: int, end: int, seconds: list[float], total: float, internal: float) -> Usage:
        s, size, handed = self._slots, self._size, self._handed[start:end]
        used = s.used + self._rows * sum(map(mul, seconds, range(start + 1, end + 1))) / total
        free = s.free - size * sum(map(mul, seconds, handed)) / total
        cached = float(s.cached)
        if s.free - size * handed[-1] < s.cached:  # those that nothing is found in are handed out first
            cached = sum(x * min(s.cached, s.free - size * blocks) for x, blocks in zip(seconds, handed, strict=True)) / total
        internal += s.internal
        return Usage(s.total, used, s.total - used - internal - free, internal, 0, free, s.shared, cached)
