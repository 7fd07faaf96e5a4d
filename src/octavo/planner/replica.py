"""One simulated engine: the real loop, scheduler and block manager; only the clock and the runner are stand-ins."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from octavo.blocks import BlockManager, blocks_for
from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.events import EventLog
from octavo.errors import ConfigError, InvalidRequestError
from octavo.limits import RequestLimits
from octavo.planner.accounting import Usage, UsageMean, usage
from octavo.planner.allocators import SCHEMES, ContiguousManager, Placement, StaticManager
from octavo.planner.latency_model import LatencyModel, load_of
from octavo.planner.leap import Leap, LeapingScheduler, LeapUsage
from octavo.planner.workload import VOCAB_SIZE, SimRequest, output_token
from octavo.request import RequestMetrics, SamplingParams
from octavo.scheduler.step import RequestUpdate, StepPlan, StepResult


class VirtualClock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class SimConfig:
    """A simulated engine."""

    num_slots: int
    """Tokens that the KV memory holds."""
    scheme: str = "paged"
    """paged, or one of the contiguous ones: maximum, power_of_two, oracle, growing, static."""
    block_size: int = 16
    """Tokens of a block, for ``paged``; any number from 1."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_model_len: int = 8192
    prefix_caching: bool = True
    placement: Placement = "first_fit"
    """Where contiguous regions go: first_fit, or buddy (sizes rounded up to powers of two, at their multiples)."""
    accounting: Literal["every_step", "none"] = "every_step"
    """Whether slots are counted by kind at every step, which takes time."""
    leaps: bool = True
    """Whether steps in which nothing is decided are advanced together (``leap``); the result is the same."""

    def manager(self, final_tokens: dict[int, int]) -> BlockManager:
        """Its blocks. Raises ConfigError where one request of max_model_len can never be placed."""
        if self.scheme == "paged":
            return BlockManager(max(1, self.num_slots // self.block_size), self.block_size, self.prefix_caching)
        if self.scheme not in SCHEMES:
            raise ConfigError(f"scheme {self.scheme!r} is not known; choose one of paged, {', '.join(SCHEMES)}")
        manager = SCHEMES[self.scheme](self.num_slots, self.max_model_len, final_tokens, self.placement)
        if manager.arena.find(self.max_model_len) is None:
            raise ConfigError(
                f"one region of max_model_len={self.max_model_len} tokens does not fit into {self.num_slots} slots "
                f"({self.placement}): lower max_model_len, or give more memory"
            )
        return manager


class SimRunner:
    """Takes time instead of computing: each step moves the clock on by what the latency model says."""

    def __init__(self, clock: VirtualClock, latency: LatencyModel, blocks: BlockManager, accounting: bool) -> None:
        self.final_tokens: dict[int, int] = {}
        self.outputs: dict[int, int] = {}
        """The token that each request's output is made of."""
        self.num_waiting: Callable[[], int] = lambda: 0
        self.all = UsageMean()
        self.pressed = UsageMean()
        """Steps in which requests wait, alone: what a saturated engine's memory holds."""
        self.last: StepPlan | None = None
        """The step executed last, and ..."""
        self.slots: Usage | None = None
        """... the slots by kind then."""
        self.num_table_entries = 0
        self.num_rows = 0
        self.num_steps = 0
        self.num_leapt_steps = 0
        self.num_leapt_tokens = 0
        self._clock, self._latency, self._blocks, self._accounting = clock, latency, blocks, accounting
        self._contiguous = blocks if isinstance(blocks, ContiguousManager) else None

    def execute(self, plan: StepPlan) -> StepResult:
        """Let the step's time pass."""
        now, blocks, contiguous = self._clock.now, self._blocks, self._contiguous
        num_copied = contiguous.num_copied if contiguous is not None else len(plan.copy_targets) * blocks.block_size
        load = load_of(plan, num_copied)
        if isinstance(contiguous, StaticManager):  # rows of ended requests run on
            load = load._replace(num_tokens=load.num_tokens + len(contiguous.ended))
        seconds = self._latency.seconds(load)
        if self._accounting:
            self._count(plan, now, seconds)
        self._clock.now = now + seconds
        self.num_steps += 1
        self.last = plan
        outputs = self.outputs
        if len(plan.request_ids) == sum(plan.sampled):
            return StepResult(array("i", [outputs[request_id] for request_id in plan.request_ids]))
        return StepResult(array("i", [outputs[i] for i, sampled in zip(plan.request_ids, plan.sampled, strict=True) if sampled]))

    def _count(self, plan: StepPlan, now: float, seconds: float) -> None:
        entries = sum(map(self._blocks.num_held, plan.request_ids)) if self._contiguous is None else 0
        self.slots = usage(self._blocks, self.final_tokens)
        self._add(now, seconds, plan.num_requests, self.slots, entries, self.num_waiting() > 0)

    def _add(self, now: float, seconds: float, rows: int, slots: Usage, entries: int, waiting: bool) -> None:
        self.all.add(now, seconds, rows, slots)
        if waiting:
            self.pressed.add(now, seconds, rows, slots)
        self.num_table_entries += entries
        self.num_rows += rows

    def leap(self, leap: Leap, scheduler: LeapingScheduler) -> None:
        """Let the time of several steps pass, in which nothing is decided."""
        rows = scheduler.num_running
        counted = LeapUsage(scheduler, self.slots, self.final_tokens) if self.slots is not None else None
        step = 0

        def after_step(grown: list[int]) -> None:
            nonlocal step
            if counted is not None:
                slots = self.slots = counted.next(grown)
                self._add(leap.begins[step], leap.seconds[step], rows, slots, counted.entries, leap.waiting)
            step += 1

        scheduler.advance(leap.num_steps, self.outputs, after_step)
        self._clock.now = leap.end
        self.num_steps += leap.num_steps
        self.num_leapt_steps += leap.num_steps
        self.num_leapt_tokens += leap.num_steps * rows


@dataclass(frozen=True, slots=True)
class Record:
    """What became of one request of a workload."""

    request: SimRequest
    replica: int
    arrival: float
    metrics: RequestMetrics | None
    """None where it was refused."""
    num_output: int
    reason: str
    """length, abort, or refused."""

    @property
    def completed(self) -> bool:
        return self.reason == "length"


class Replica:
    """A simulated engine and the requests it has."""

    def __init__(self, index: int, config: SimConfig, latency: LatencyModel) -> None:
        self.index = index
        self.config = config
        self.clock = VirtualClock()
        self.live: dict[int, SimRequest] = {}
        """Requests that have not ended, by the engine's id."""
        self.num_outputs: dict[int, int] = {}
        self.busy = False
        """Whether a step is running, by the virtual clock."""
        finals: dict[int, int] = {}
        self.blocks = config.manager(finals)
        self.scheduler = LeapingScheduler(config.scheduler, config.max_model_len, self.blocks)
        self.runner = SimRunner(self.clock, latency, self.blocks, config.accounting == "every_step")
        self.runner.final_tokens = finals
        self.runner.num_waiting = lambda: self.scheduler.num_waiting
        limits = RequestLimits(VOCAB_SIZE, config.max_model_len, self.blocks.num_blocks * self.blocks.block_size)
        self.core = EngineCore(self.scheduler, self.runner, limits, self.clock, EventLog(0))
        self._ids: dict[int, int] = {}
        self._held: dict[int, Record] = {}
        if isinstance(self.blocks, StaticManager):
            self.blocks.on_batch_end = self._batch_ended
        self._batch_over: list[int] = []
        self._latency = latency
        self._leaps = config.leaps and config.scheme == "paged"
        self._quiet = False
        self._leap: Leap | None = None

    def submit(self, request: SimRequest, now: float) -> Record | None:
        """Queue a request; its record at once if it is refused."""
        self._quiet = False
        later, self.clock.now = self.clock.now, now
        try:
            engine_id = self.core.add_request(request.token_ids(), _params(request.output_len))
        except InvalidRequestError:
            return Record(request, self.index, now, None, 0, "refused")
        finally:
            self.clock.now = later
        self.live[engine_id], self._ids[request.id] = request, engine_id
        self.num_outputs[engine_id] = 0
        self.runner.final_tokens[engine_id] = request.num_tokens
        self.runner.outputs[engine_id] = output_token(request.id)
        return None

    def cancel(self, request_id: int, now: float) -> list[Record]:
        """Give a request up, if it has not ended."""
        engine_id = self._ids.get(request_id)
        if engine_id is None:
            return []
        self._quiet = False
        self.clock.now = now
        return self._records(self.core.abort(engine_id))

    def step(self, now: float) -> list[Record]:
        """Run one step from ``now`` to ``clock.now``. Returns the records of requests that end with it."""
        self.clock.now = now
        self.runner.last = None
        updates = self.core.step()
        plan = self.runner.last
        assert plan is not None or not self.core.has_work, "the simulated engine has work and does nothing"
        ended = self._records(updates)
        self._quiet = self._leaps and plan is not None and not ended and self.scheduler.is_quiet(plan)
        return ended

    def begin_leap(self, now: float) -> float | None:
        """Begin several steps at once, if nothing will be decided in them. Returns when they end; ``cut_leap`` may shorten that."""
        if not self._quiet:
            return None
        self._quiet = False
        num_steps = self.scheduler.num_alike()
        if num_steps < 2:
            return None
        self._leap = Leap(now, num_steps, self.scheduler, self._latency)
        return self._leap.end

    def cut_leap(self, now: float) -> float | None:
        """Somebody comes or goes at ``now``: begin no more steps. Returns when the one that runs ends, or None if it is no leap."""
        if self._leap is None:
            return None
        self._leap.cut(now)
        return self._leap.end

    def end_leap(self) -> None:
        """Take the steps of the leap, if there is one."""
        leap, self._leap = self._leap, None
        if leap is not None:
            for engine_id, _ in self.scheduler.running():
                self.num_outputs[engine_id] += leap.num_steps
            self.runner.leap(leap, self.scheduler)

    def _records(self, updates: list[RequestUpdate]) -> list[Record]:
        ended: list[Record] = []
        for update in updates:
            engine_id = update.request_id
            self.num_outputs[engine_id] += len(update.token_ids)
            if update.finish_reason is not None:
                ended.append(self._forget(update))
        return self._static(ended) if isinstance(self.blocks, StaticManager) else ended

    def _forget(self, update: RequestUpdate) -> Record:
        engine_id, reason = update.request_id, update.finish_reason
        request = self.live.pop(engine_id)
        del self._ids[request.id], self.runner.outputs[engine_id]
        if not isinstance(self.blocks, StaticManager):
            del self.runner.final_tokens[engine_id]
        metrics, num_output = update.metrics, self.num_outputs.pop(engine_id)
        assert metrics is not None and reason is not None
        return Record(request, self.index, metrics.arrival_time, metrics, num_output, reason.value)

    def _batch_ended(self, engine_ids: list[int]) -> None:
        self._batch_over += engine_ids

    def _static(self, ended: list[Record]) -> list[Record]:
        """Answers of a static batch are given when its last request has ended."""
        for record in ended:
            self._held[record.request.id] = record
        if not self._batch_over:
            return [self._held.pop(r.request.id) for r in ended if r.metrics is None or r.metrics.admitted_time is None]
        self._batch_over.clear()
        now, held = self.clock.now, list(self._held.values())
        self._held.clear()
        return [replace(r, metrics=r.metrics._replace(finish_time=now)) if r.metrics is not None else r for r in held]


@lru_cache(maxsize=65_536)
def _params(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)


def slots_for(memory: int, kv_bytes_per_token: int, block_size: int = 1) -> int:
    """Tokens that fit into so many bytes, in whole blocks."""
    blocks = memory // (kv_bytes_per_token * block_size)
    if blocks < 1:
        raise ConfigError(f"{memory} bytes hold no block of {block_size} tokens of {kv_bytes_per_token} bytes each")
    return blocks_for(blocks * block_size, 1)
