"""The engine's loop: schedule, execute, commit. It knows no arrays, no text and no clients.

One thread owns an EngineCore. Between two steps requests may be added, aborted or finished.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from octavo.engine.events import Admitted, Arrived, EventLog, Finished, FirstToken, Preempted
from octavo.engine.metrics import Metrics
from octavo.errors import EngineError
from octavo.limits import RequestLimits, make_request
from octavo.request import FinishReason, SamplingParams, split_id
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step import RequestUpdate, StepPlan, StepResult, TokenLogprobs

__all__ = ["EngineCore", "RequestUpdate", "Runner", "TokenLogprobs"]

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs plans: the model, or something that stands for it."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute what the plan says."""


class EngineCore:
    """All requests of one engine, moved on step by step.

    ``clock`` returns seconds; tests and the simulator bring their own.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, limits: RequestLimits, clock: Callable[[], float], events: EventLog) -> None:
        self.limits = limits
        self.events = events
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._metrics = Metrics()
        self._next_id = 0
        self._without_output: set[int] = set()
        events.subscribe(self._metrics.hear)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return self._scheduler.has_work

    def add_request(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Check a request and queue it. Returns its id; raises InvalidRequestError, and then nothing has changed."""
        now = self._clock()
        request = make_request(self._next_id, token_ids, params, self.limits, now)
        self._next_id += 1
        self._scheduler.add(request)
        self._without_output.add(request.id)
        self.events.record(Arrived(now, request.id, request.prompt_len, request.max_tokens, params.priority, params.num_samples))
        return request.id

    def abort(self, request_id: int, sample_index: int | None = None) -> list[RequestUpdate]:
        """Give a request up, or one sample of it. Returns the last update of each sample that had not ended before."""
        return self.finish(request_id, FinishReason.ABORT, sample_index=sample_index)

    def finish(
        self, request_id: int, reason: FinishReason, stop_reason: int | str | None = None, sample_index: int | None = None
    ) -> list[RequestUpdate]:
        """End a request, or one sample of it, between two steps, such as at a stop string. Returns as ``abort`` does."""
        updates = self._scheduler.finish(request_id, reason, stop_reason, sample_index=sample_index, now=self._clock())
        self._record_updates(updates)
        return updates

    def step(self) -> list[RequestUpdate]:
        """Run one step. Returns what each request got from it; empty if there was nothing to run.

        If the runner fails, the requests of this step end with FinishReason.ERROR and all others go on.
        """
        plan = self._scheduler.schedule(self._clock())
        if plan is None:
            return []
        self._record_plan(plan)
        try:
            result = self._runner.execute(plan)
        except Exception as error:
            logger.exception("step %d failed with %d requests", plan.step, plan.num_requests)
            updates = self._fail(plan, error)
        except BaseException as interrupt:
            self._record_updates(self._fail(plan, interrupt))
            raise
        else:
            updates = self._scheduler.commit(plan, result, self._clock())
        self._record_updates(updates)
        return updates

    def stats(self) -> dict[str, Any]:
        """Figures of this moment and since the start; see ``Metrics.report``."""
        scheduler = self._scheduler
        return self._metrics.report(scheduler.num_running, scheduler.num_waiting, scheduler.blocks)

    def reset_prefix_cache(self) -> None:
        """Forget all that can be found; requests that run now leave nothing behind either."""
        self._scheduler.blocks.reset_prefix_cache()

    def check(self) -> None:
        """Prove, between two steps, that no block is lost; AssertionError says where the books do not balance."""
        self._scheduler.check()

    def _fail(self, plan: StepPlan, cause: BaseException) -> list[RequestUpdate]:
        error = EngineError(f"the engine failed in step {plan.step} while this request was running: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return self._scheduler.fail(plan, error, self._clock())

    def _record_plan(self, plan: StepPlan) -> None:
        now, record = self._clock(), self.events.record
        for lost in plan.preempted:
            (request_id, number), (by, _) = split_id(lost.request_id), split_id(lost.by)
            counts = lost.num_needed, lost.num_given, lost.num_lost
            record(Preempted(now, request_id, by, *counts, lost.was_running, sample_index=number))
        starts = dict(zip(plan.request_ids, plan.num_computed, strict=True)) if plan.admitted else {}
        for admission in plan.admitted:
            request_id, number = split_id(admission.request_id)
            num_computed, num_blocks = starts[admission.request_id], len(admission.block_ids)
            record(Admitted(now, request_id, admission.resumed, num_computed, num_blocks, sample_index=number))
        self._metrics.observe_step(plan, self._scheduler.num_running, self._scheduler.blocks.stats())

    def _record_updates(self, updates: list[RequestUpdate]) -> None:
        now, record, silent = self._clock(), self.events.record, self._without_output
        num_tokens = num_accepted = 0
        for update in updates:
            num_tokens += len(update.token_ids)
            if len(update.token_ids) > 1 and update.beam is None:
                num_accepted += len(update.token_ids) - 1
            if update.token_ids and update.request_id in silent:
                silent.remove(update.request_id)
                record(FirstToken(now, update.request_id))
            if update.finish_reason is not None and update.metrics is not None:
                reason, index = update.finish_reason, update.sample_index
                record(Finished(now, update.request_id, reason, update.stop_reason, update.metrics, sample_index=index))
                if not self._scheduler.is_live(update.request_id):
                    silent.discard(update.request_id)
        self._metrics.num_tokens_generated += num_tokens
        self._metrics.num_drafts_accepted += num_accepted
