"""One simulated engine: the real loop, scheduler and block manager; only the clock and the runner are stand-ins."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from octavo.blocks import BlockManager, blocks_for
from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.events import EventLog
from octavo.errors import ConfigError, ContextLengthError, InvalidRequestError
from octavo.limits import RequestLimits
from octavo.planner.allocators import SCHEMES, ContiguousManager, Placement
from octavo.planner.latency_model import LatencyModel
from octavo.planner.leap import Leap, LeapingScheduler
from octavo.planner.sim_runner import RunCounts, SimRunner, VirtualClock
from octavo.planner.static_batching import STATIC_SCHEMES, StaticBatching, StaticPaged
from octavo.planner.workload import VOCAB_SIZE, SimRequest, output_token
from octavo.request import FinishReason, RequestMetrics, SamplingParams, fork_id, split_id
from octavo.scheduler.step import RequestUpdate


@dataclass(frozen=True, slots=True)
class SimConfig:
    """A simulated engine."""

    num_slots: int
    """Tokens that the KV memory holds."""
    scheme: str = "paged"
    """How requests get memory: paged, or one of the contiguous ones: maximum, power_of_two, oracle, growing."""
    block_size: int = 16
    """Tokens of a block, for ``paged``; any number from 1."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_model_len: int = 8192
    prefix_caching: bool = True
    placement: Placement = "first_fit"
    """Where contiguous regions go: first_fit, or buddy (sizes rounded up to powers of two, at their multiples)."""
    batching: Literal["continuous", "static"] = "continuous"
    """Whether requests join and leave at every step, or batches wait for their longest."""
    accounting: Literal["every_step", "none"] = "every_step"
    """Whether slots are counted by kind at every step, which takes time."""
    leaps: bool = True
    """Whether steps in which nothing is decided are advanced together (``leap``); the result is the same."""

    def manager(self, final_tokens: dict[int, int]) -> BlockManager:
        """Its blocks. Raises ConfigError where one request of max_model_len can never be placed."""
        if self.scheme == "paged":
            kind = StaticPaged if self.batching == "static" else BlockManager
            return kind(max(1, self.num_slots // self.block_size), self.block_size, self.prefix_caching)
        if self.scheme not in SCHEMES:
            raise ConfigError(f"scheme {self.scheme!r} is not known; choose one of paged, {', '.join(SCHEMES)}")
        schemes = STATIC_SCHEMES if self.batching == "static" else SCHEMES
        manager = schemes[self.scheme](self.num_slots, self.max_model_len, final_tokens, self.placement)
        if manager.arena.find(self.max_model_len) is None:
            raise ConfigError(
                f"one region of max_model_len={self.max_model_len} tokens does not fit into {self.num_slots} slots "
                f"({self.placement}): lower max_model_len, or give more memory"
            )
        return manager


@dataclass(frozen=True, slots=True)
class Record:
    """What became of one request of a workload."""

    request: SimRequest
    replica: int
    arrival: float
    metrics: RequestMetrics | None
    """None where it was refused."""
    num_output: int
    """Output tokens, of all its samples."""
    reason: str
    """length, abort, or refused."""
    refusal: str = ""
    """Why it was refused; empty where it was not."""

    @property
    def completed(self) -> bool:
        return self.reason == "length"


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """What one simulated engine did."""

    stats: dict[str, Any]
    """Those of the engine itself: ``EngineCore.stats``."""
    counts: RunCounts
    num_slots_copied: int
    """By contiguous regions that moved."""
    num_stalls: int
    """Times that such a region had to grow and could not."""
    num_entries: int
    """Blocks that could be found at the end."""


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
        contiguous = isinstance(self.blocks, ContiguousManager)
        # Regions cannot be shared, so there each sample is a request of its own.
        scheduling = replace(config.scheduler, fork_mode="recompute") if contiguous else config.scheduler
        self.scheduler = LeapingScheduler(scheduling, config.max_model_len, self.blocks)
        self.runner = SimRunner(self.clock, latency, self.blocks, finals, config.accounting == "every_step")
        self.runner.num_waiting = lambda: self.scheduler.num_waiting
        limits = RequestLimits(
            VOCAB_SIZE, config.max_model_len, self.blocks.num_blocks * self.blocks.block_size, block_size=self.blocks.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
        )  # fmt: skip
        self.core = EngineCore(self.scheduler, self.runner, limits, self.clock, EventLog(0))
        self._ids: dict[int, int] = {}
        self._held: dict[int, Record] = {}
        if isinstance(self.blocks, StaticBatching):
            self.blocks.begin(config.scheduler.max_num_seqs, lambda: self.scheduler.num_waiting, self._batch_ended)
        self._batch_over = False
        self._latency = latency
        self._leaps = config.leaps and type(self.blocks) is BlockManager
        self._admits_nobody = False
        self._leap: Leap | None = None

    def submit(self, request: SimRequest, now: float) -> Record | None:
        """Queue a request; its record at once if it is refused."""
        if request.beams and type(self.blocks) is not BlockManager:
            raise ConfigError(
                "beams fork, which takes blocks and continuous batching: simulate them with the scheme paged, or take samples (n)"
            )
        self._admits_nobody = False
        later, self.clock.now = self.clock.now, now
        try:
            tokens = request.token_ids(self.config.max_model_len)  # a longer prompt is refused as one of this length is
            engine_id = self.core.add_request(tokens, _params(request.output_len, request.n, request.beams))
        except InvalidRequestError as error:
            return Record(request, self.index, now, None, 0, "refused", self._refusal(request, error))
        finally:
            self.clock.now = later
        self.live[engine_id], self._ids[request.id] = request, engine_id
        self.num_outputs[engine_id] = 0
        self.runner.final_tokens[engine_id] = request.num_tokens
        for sample in range(request.n):
            self.runner.outputs[fork_id(engine_id, sample)] = output_token(request.id, sample)
        if request.beams:
            self.runner.beams[engine_id] = request.n
        return None

    def _refusal(self, request: SimRequest, error: InvalidRequestError) -> str:
        """Why, in words that are the same for all requests refused for the same reason."""
        if not isinstance(error, ContextLengthError):
            return str(error).partition(": ")[0]
        if request.num_tokens > self.config.max_model_len:
            return f"longer than {self.config.max_model_len:,} tokens"
        return f"more than the KV memory's {self.config.num_slots:,} tokens hold"

    def cancel(self, request_id: int, now: float) -> list[Record]:
        """Give a request up, if it has not ended."""
        engine_id = self._ids.get(request_id)
        if engine_id is None:
            return []
        self._admits_nobody = False
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
        self._admits_nobody = plan is not None and not ended and self.scheduler.admits_nobody(plan)
        return ended

    def begin_leap(self, now: float) -> float | None:
        """Begin several steps at once, if nothing will be decided in them. Returns when they end; ``cut_leap`` may shorten that."""
        if not self._leaps or (self.scheduler.num_waiting and not self._admits_nobody):
            return None
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
            self._admits_nobody = False
            for request_id, _ in self.scheduler.running():
                self.num_outputs[split_id(request_id)[0]] += leap.num_steps
            self.runner.leap(leap, self.scheduler)

    def figures(self) -> ReplicaFigures:
        """All that is told of it once everything has ended."""
        regions = self.blocks if isinstance(self.blocks, ContiguousManager) else None
        return ReplicaFigures(
            self.core.stats(),
            self.runner.counts,
            regions.num_slots_copied if regions is not None else 0,
            regions.num_stalls if regions is not None else 0,
            self.blocks.num_findable,
        )

    def _records(self, updates: list[RequestUpdate]) -> list[Record]:
        ends: dict[int, RequestUpdate] = {}
        for update in updates:
            if update.request_id in self.num_outputs:
                self.num_outputs[update.request_id] += len(update.token_ids)
            if update.finish_reason is not None and not self.scheduler.is_live(update.request_id):
                ends[update.request_id] = update
        ended = [self._forget(update) for update in ends.values()]
        return self._static(ended) if isinstance(self.blocks, StaticBatching) else ended

    def _forget(self, update: RequestUpdate) -> Record:
        engine_id, reason = update.request_id, update.finish_reason
        request = self.live.pop(engine_id)
        del self._ids[request.id]
        for sample in range(request.n):
            del self.runner.outputs[fork_id(engine_id, sample)]
        self.runner.beams.pop(engine_id, None)
        if not isinstance(self.blocks, StaticBatching):  # there its memory is counted on
            del self.runner.final_tokens[engine_id]
        metrics, num_output = update.metrics, self.num_outputs.pop(engine_id)
        assert metrics is not None and reason is not None and reason is not FinishReason.ERROR, "a simulated step failed; the log says why"
        return Record(request, self.index, metrics.arrival_time, metrics, num_output, reason.value)

    def _batch_ended(self) -> None:
        self._batch_over = True

    def _static(self, ended: list[Record]) -> list[Record]:
        """Answers of a static batch are given when its last request has ended."""
        for record in ended:
            self._held[record.request.id] = record
        if not self._batch_over:
            return [self._held.pop(r.request.id) for r in ended if r.metrics is None or r.metrics.admitted_time is None]
        self._batch_over = False
        now, held = self.clock.now, list(self._held.values())
        self._held.clear()
        return [replace(r, metrics=r.metrics._replace(finish_time=now)) if r.metrics is not None else r for r in held]


@lru_cache(maxsize=65_536)
def _params(output_len: int, n: int, beams: bool) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, n=n, beam_width=n if beams else None)


def slots_for(memory: int, kv_bytes_per_token: int, block_size: int = 1) -> int:
    """Tokens that fit into so many bytes, in whole blocks."""
    blocks = memory // (kv_bytes_per_token * block_size)
    if blocks < 1:
        raise ConfigError(f"{memory} bytes hold no block of {block_size} tokens of {kv_bytes_per_token} bytes each")
    return blocks_for(blocks * block_size, 1)
