"""The runner of a simulated engine: it takes time instead of computing, and counts what there is to count meanwhile."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.blocks import BlockManager
from octavo.planner.accounting import Usage, UsageMean, usage
from octavo.planner.allocators import ContiguousManager
from octavo.planner.beam_candidates import candidates
from octavo.planner.latency_model import LatencyModel, load_of
from octavo.planner.leap import Leap, LeapingScheduler, LeapUsage
from octavo.planner.static_batching import StaticBatching
from octavo.planner.timeline import Timeline
from octavo.request import fork_id, num_candidates, split_id
from octavo.scheduler.step import StepPlan, StepResult


class VirtualClock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class RunCounts:
    """What a simulated runner has counted."""

    every: UsageMean = field(default_factory=UsageMean)
    pressed: UsageMean = field(default_factory=UsageMean)
    """Steps in which requests wait, alone: what a saturated engine's memory holds."""
    timeline: Timeline = field(default_factory=Timeline)
    num_table_entries: int = 0
    """Of running requests, summed over steps; so are the rows."""
    num_rows: int = 0
    num_steps: int = 0
    num_leapt_steps: int = 0
    num_leapt_tokens: int = 0


class SimRunner:
    """Takes time instead of computing: each step moves the clock on by what the latency model says."""

    def __init__(
        self, clock: VirtualClock, latency: LatencyModel, blocks: BlockManager, final_tokens: dict[int, int], accounting: bool
    ) -> None:
        self.final_tokens = final_tokens
        """Tokens that each request, or each of its samples, will have at its end."""
        self.outputs: dict[int, int] = {}
        """The token that each sample's output is made of, by ``fork_id``."""
        self.beams: dict[int, int] = {}
        """The beam width of each request that has one."""
        self.num_waiting: Callable[[], int] = lambda: 0
        self.counts = RunCounts()
        self.last: StepPlan | None = None
        """The step executed last."""
        self._clock, self._latency, self._blocks, self._accounting = clock, latency, blocks, accounting
        self._contiguous = blocks if isinstance(blocks, ContiguousManager) else None

    def execute(self, plan: StepPlan) -> StepResult:
        """Let the step's time pass."""
        now, blocks, contiguous = self._clock.now, self._blocks, self._contiguous
        num_copied = contiguous.num_copied if contiguous is not None else len(plan.copy_targets) * blocks.block_size
        load = load_of(plan, num_copied)
        if isinstance(blocks, StaticBatching):
            load = load._replace(num_tokens=load.num_tokens + blocks.num_empty_rows)
        seconds = self._latency.seconds(load)
        if self._accounting:
            entries = sum(map(blocks.num_held, plan.request_ids)) if contiguous is None else 0
            self._count(now, seconds, plan.num_requests, usage(blocks, self.final_tokens), self.num_waiting() > 0)
            self.counts.num_table_entries += entries
            self.counts.num_rows += plan.num_requests
        self._clock.now = now + seconds
        self.counts.num_steps += 1
        self.last = plan
        return self._result(plan)

    def leap(self, leap: Leap, scheduler: LeapingScheduler) -> None:
        """Let the time of several steps pass, in which nothing is decided."""
        rows, counts = scheduler.num_running, self.counts
        if self._accounting:
            found = LeapUsage(leap, scheduler, usage(self._blocks, self.final_tokens), self.final_tokens)
            for begin, seconds, slots in found.spans():
                self._count(begin, seconds, rows, slots, leap.waiting)
            counts.num_table_entries += found.num_table_entries
            counts.num_rows += rows * leap.num_steps
        scheduler.advance(leap.num_steps, self.outputs)
        self._clock.now = leap.end
        counts.num_steps += leap.num_steps
        counts.num_leapt_steps += leap.num_steps
        counts.num_leapt_tokens += leap.num_steps * rows

    def _count(self, begin: float, seconds: float, rows: int, slots: Usage, waiting: bool) -> None:
        counts = self.counts
        counts.every.add(seconds, rows, slots)
        counts.timeline.add(begin, seconds, rows, slots)
        if waiting:
            counts.pressed.add(seconds, rows, slots)

    def _result(self, plan: StepPlan) -> StepResult:
        outputs, result = self.outputs, StepResult(array("i"))
        tokens = result.token_ids
        for index, (request_id, num_sampled) in enumerate(zip(plan.request_ids, plan.sampled, strict=True)):
            if num_sampled == 1 and (token := outputs.get(request_id)) is not None and not self.beams:
                tokens.append(token)
            elif num_sampled:
                self._sample(result, request_id, num_sampled, plan.num_computed[index])
        return result

    def _sample(self, result: StepResult, request_id: int, num_sampled: int, position: int) -> None:
        group, number = split_id(request_id)
        if (width := self.beams.get(group)) is None:
            result.token_ids.extend(self.outputs[fork_id(group, sample)] for sample in range(number, number + num_sampled))
            return
        result.logprobs[len(result.token_ids)] = found = candidates(self.outputs[group], number, position, num_candidates(width, 0))
        result.token_ids.append(found.token_id)
