"""Decode steps in which nothing is decided, advanced together, with the result of taking them one by one.

After a step that admitted, preempted and ended nothing, in which each running request got one token, the next ones are alike until a
request ends, the free blocks are used up, or somebody arrives or gives up. Only two moments of a request matter meanwhile:

    slots   | . . . . | . . . x |       its last slot fills: the block becomes findable
            | . . . . | . . . . | x     its blocks are full: a new one is handed out

They are replayed in the order in which single steps would have them, so the same blocks are given, found and evicted.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from itertools import accumulate

from octavo.planner.accounting import Usage
from octavo.planner.latency_model import LatencyModel, StepLoad
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step import StepPlan


class LeapingScheduler(Scheduler):
    """The scheduler, and a way to move all running requests on by several steps."""

    def is_quiet(self, plan: StepPlan) -> bool:
        """Whether the step just committed decided nothing: the next one is like it."""
        running = len(self._queues.running)
        return (
            running == plan.num_requests == plan.num_tokens == sum(plan.sampled)
            and not plan.admitted
            and not plan.preempted
            and not self._queues.preempted
            and not self._groups
            and not self._queues.searches
        )

    def num_alike(self) -> int:
        """Steps until one ends a request or lacks a block; that one is not counted."""
        running, size, free = self._queues.running.requests, self.blocks.block_size, self.blocks.num_free
        low, high = 0, min(r.max_tokens - r.num_output for r in running) - 1
        held = sum(-(-r.num_computed // size) for r in running)
        if sum(-(-(r.num_computed + high) // size) for r in running) - held <= free:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            needed = sum(-(-(r.num_computed + middle) // size) for r in running) - held
            low, high = (middle, high) if needed <= free else (low, middle)
        return low

    def advance(self, num_steps: int, outputs: Mapping[int, int], after_step: Callable[[list[int]], None]) -> None:
        """Take ``num_steps`` steps. ``outputs`` tells each request's next tokens; ``after_step`` hears who got a block."""
        running, blocks, size = self._queues.running.requests, self.blocks, self.blocks.block_size
        starts = [request.num_computed for request in running]
        for request in running:
            request.token_ids.extend(array("i", [outputs[request.id]]) * num_steps)
        due: list[list[int]] = [[] for _ in range(size)]
        for index, start in enumerate(starts):
            due[-start % size].append(index)
        for step in range(num_steps):
            grows, fills = due[step % size], due[(step + 1) % size]
            for index in sorted({*grows, *fills}):
                new = blocks.reserve(running[index].id, starts[index] + step + 1)
                assert new is not None, "a block is lacking in a step that was counted as alike"
            blocks.end_step()
            after_step([running[index].id for index in grows])
        for request, start in zip(running, starts, strict=True):
            blocks.reserve(request.id, start + num_steps)
            request.num_computed = start + num_steps
        self._step += num_steps

    def running(self) -> list[tuple[int, int]]:
        """(id, tokens computed) of each running request, in order."""
        return [(request.id, request.num_computed) for request in self._queues.running.requests]


class Leap:
    """Steps on their way: when each begins, and how many of them will be taken."""

    def __init__(self, now: float, num_steps: int, scheduler: LeapingScheduler, latency: LatencyModel) -> None:
        running = scheduler.running()
        rows, first = len(running), sum(computed + 1 for _, computed in running)
        contexts = range(first, first + num_steps * rows, rows)
        self.num_steps = num_steps
        self.seconds = [latency.seconds(StepLoad(rows, rows, rows, context, context)) for context in contexts]
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


class LeapUsage:
    """Slots by kind, step by step, without counting all tables again."""

    def __init__(self, scheduler: LeapingScheduler, slots: Usage, final_tokens: Mapping[int, int]) -> None:
        """``slots`` are those of the step before."""
        self._blocks, self._final, self._slots = scheduler.blocks, final_tokens, slots
        self._rows = len(scheduler.running())
        self._tokens = dict(scheduler.running())
        self.entries = sum(map(self._blocks.num_held, self._tokens))
        """Block table entries of the running requests."""
        self._step = 0

    def next(self, grown: list[int]) -> Usage:
        """Slots in the next step, in which these requests got a block each."""
        s, size, blocks = self._slots, self._blocks.block_size, self._blocks
        internal = s.internal
        for request_id in grown:
            final, start = self._final[request_id], self._tokens[request_id] + self._step
            if start + size >= final:  # the last block that it will need
                internal += -final % size
        self._step += 1
        self.entries += len(grown)
        used, free = s.used + self._rows, blocks.num_free * size
        self._slots = Usage(
            s.total, used, s.total - used - internal - free, internal, 0, free, s.shared, blocks.num_cached * size
        )  # fmt: skip
        return self._slots
