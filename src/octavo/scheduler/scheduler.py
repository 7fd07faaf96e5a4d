"""Stage 2 of 7: the scheduler. Before it: ``request``. After it: ``blocks``, then ``runner``.

A request has tokens known and tokens computed; each step lets the second catch up with the first under a token
budget. A long prompt in chunks, one token after another, and a fresh start after preemption are the same case:

    waiting --admit--> running --preempt--> preempted        rank of every running request
              ^          | ^                   |               < rank of every preempted one
              |       finish `----resume-------'
           add()         v
                    (forgotten)

Why all requests finish: ranks are fixed, a running request takes blocks only from those that rank behind it, and the
whole cache holds a request of ``max_model_len``. So the first in rank among the running always goes on.
"""

from __future__ import annotations

from octavo.blocks import BlockManager, blocks_for
from octavo.config import SchedulerConfig
from octavo.errors import EngineError, MemoryConfigError
from octavo.request import FinishReason, Request
from octavo.scheduler.admission import Passing, StepBudget
from octavo.scheduler.policies import POLICIES, RequestQueue
from octavo.scheduler.step import Preemption, RequestUpdate, StepPlan, StepResult


class Scheduler:
    """Owns the progress of all requests and their queues; nobody else changes them."""

    def __init__(self, config: SchedulerConfig, max_model_len: int, blocks: BlockManager) -> None:
        needed = blocks_for(max_model_len, blocks.block_size)
        if needed > blocks.num_blocks:
            raise MemoryConfigError(
                f"a request of max_model_len={max_model_len} tokens needs {needed} blocks of {blocks.block_size}, but there are "
                f"{blocks.num_blocks}: lower max_model_len to {blocks.num_blocks * blocks.block_size}, or raise num_blocks to {needed}"
            )
        self.config = config
        self.max_model_len = max_model_len
        self.blocks = blocks
        policy = POLICIES[config.policy]
        self._requests: dict[int, Request] = {}
        self._waiting = RequestQueue(policy)
        self._running = RequestQueue(policy)
        self._preempted = RequestQueue(policy)
        self._released: list[int] = []
        self._step = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run: new and preempted ones."""
        return len(self._waiting) + len(self._preempted)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        assert request.id not in self._requests, f"request {request.id} was added before"
        assert request.prompt_len + request.max_tokens <= self.max_model_len, f"request {request.id} may never fit"
        self._requests[request.id] = request
        self._waiting.add(request)

    def finish(
        self, request_id: int, reason: FinishReason, stop_reason: int | str | None = None, *, now: float, error: EngineError | None = None
    ) -> RequestUpdate | None:
        """End a request at any moment, wherever it is. Returns its last update, or None if it had ended before."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._end(request, reason, stop_reason, now)
        return RequestUpdate(request_id, finish_reason=reason, stop_reason=stop_reason, metrics=request.metrics, error=error)

    def abort(self, request_id: int, *, now: float) -> RequestUpdate | None:
        """End a request because its caller gave it up; see ``finish``."""
        return self.finish(request_id, FinishReason.ABORT, now=now)

    def schedule(self, now: float) -> StepPlan | None:
        """Decide the next step and reserve its blocks. None if there is nothing to do."""
        budget = StepBudget(self.config.max_num_batched_tokens)
        self._continue_running(budget)
        if not budget.preempted:  # no block is left then, until a request ends
            self._resume_preempted(budget)
            self._admit_waiting(budget, now)
        plan = budget.plan(self._step, self._released)
        if plan is not None:
            self._step += 1
            self._released = []
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestUpdate]:
        """Take over what a step computed. Requests that ended since it was scheduled are ignored."""
        assert len(result.token_ids) == sum(plan.sampled), f"{len(result.token_ids)} tokens for {sum(plan.sampled)} sampled requests"
        updates: list[RequestUpdate] = []
        requests, tokens, logprobs, prompt_logprobs = self._requests, iter(result.token_ids), result.logprobs, result.prompt_logprobs
        for request_id, num_scheduled, sampled in zip(plan.request_ids, plan.num_scheduled, plan.sampled, strict=True):
            token = next(tokens) if sampled else -1
            request = requests.get(request_id)
            if request is None:
                continue
            request.num_computed += num_scheduled
            prompt = tuple(prompt_logprobs.get(request_id, ())) if prompt_logprobs else ()
            if not sampled:
                if prompt:
                    updates.append(RequestUpdate(request_id, prompt_logprobs=prompt))
                continue
            reason, stop_reason = self._append(request, token, now)
            metrics = request.metrics if reason is not None else None
            chosen = logprobs.get(request_id) if logprobs else None
            updates.append(RequestUpdate(request_id, (token,), chosen, prompt, reason, stop_reason, metrics))
        return updates

    def fail(self, plan: StepPlan, error: EngineError, now: float) -> list[RequestUpdate]:
        """End the requests of a step that the runner could not execute; all others go on."""
        self._released = [*plan.released, *self._released]
        ended = (self.finish(request_id, FinishReason.ERROR, now=now, error=error) for request_id in plan.request_ids)
        return [update for update in ended if update is not None]

    def check(self) -> None:
        """Prove, between two steps, that blocks and queues agree; AssertionError says where they do not."""
        self.blocks.check()
        queues = (self._waiting, self._running, self._preempted)
        assert sum(map(len, queues)) == len(self._requests), "a request is in no queue or in two"
        for request in self._requests.values():
            covered = self.blocks.num_tokens(request.id)
            assert covered == request.num_computed, (
                f"request {request.id} computed {request.num_computed} tokens, its table covers {covered}"
            )
            assert request not in self._waiting or covered == 0, f"waiting request {request.id} holds blocks"
        ended = self.blocks.request_ids - self._requests.keys()
        assert not ended, f"blocks are held for requests that have ended: {sorted(ended)}"

    # ---------------------------------------------------------------- one step: running, preempted, waiting

    def _continue_running(self, budget: StepBudget) -> None:
        running, reserve, add = self._running.requests, self.blocks.reserve, budget.add
        index = 0
        while index < len(running) and budget.num_tokens_left > 0:
            request = running[index]
            index += 1
            start = request.num_computed
            num_tokens = len(request.token_ids) - start
            if num_tokens > 1:
                # Those behind get at least one token each, so that a long prompt does not stop the others' output.
                num_tokens = min(num_tokens, max(1, budget.num_tokens_left - (len(running) - index)))
            new_blocks = reserve(request.id, start + num_tokens)
            if new_blocks is None:
                num_tokens = self._make_room(request, num_tokens, budget)
                if num_tokens == 0:
                    return
                new_blocks = reserve(request.id, start + num_tokens)
                assert new_blocks is not None
            add(request, num_tokens, new_blocks)

    def _resume_preempted(self, budget: StepBudget) -> None:
        """In order of rank. If nothing runs the first one fits, as it alone still holds blocks; see ``_make_room``."""
        while self._preempted and self._can_take_one(budget):
            request = self._preempted.requests[0]
            if self.blocks.num_missing(request.id, len(request.token_ids)) > self.blocks.num_free:
                return
            self._preempted.remove(request)
            self._start(request, budget)

    def _admit_waiting(self, budget: StepBudget, now: float) -> None:
        passing = Passing(self.config.max_passed_over)
        index = 0
        while index < len(self._waiting) and self._can_take_one(budget) and passing.allowed:
            request = self._waiting.requests[index]
            if not self._ranks_before_preempted(request):
                return
            if self.blocks.num_missing(request.id, len(request.token_ids)) > self.blocks.num_free:
                passing.skip(request)
                index += 1
                continue
            passing.admitted()
            self._waiting.remove(request)
            request.admitted_time = now
            self._start(request, budget)

    def _can_take_one(self, budget: StepBudget) -> bool:
        return budget.num_tokens_left > 0 and len(self._running) < self.config.max_num_seqs

    def _ranks_before_preempted(self, request: Request) -> bool:
        if not self._preempted:
            return True
        policy = self._preempted.policy
        return policy(request) < policy(self._preempted.requests[0])

    def _start(self, request: Request, budget: StepBudget) -> None:
        num_tokens = min(len(request.token_ids) - request.num_computed, budget.num_tokens_left)
        new_blocks = self.blocks.reserve(request.id, request.num_computed + num_tokens)
        assert new_blocks is not None, f"request {request.id} was found to fit but does not"
        self._running.add(request)
        budget.admit(request, num_tokens, self.blocks.block_ids(request.id))

    # ---------------------------------------------------------------- preemption

    def _make_room(self, request: Request, num_tokens: int, budget: StepBudget) -> int:
        """Free blocks for the next ``num_tokens`` tokens of a running request. Returns for how many there is room now.

        First the heads that preempted requests keep, newest first, then running requests that rank behind it, last
        first. If even one token has no room, nobody ranks behind it: it steps back itself, with its blocks.

            rank     first ............ request | ........ last running | first preempted ... last
            blocks   not touched                | taken next <--------- | taken first <---- all gone already
        """
        blocks, end = self.blocks, request.num_computed + num_tokens
        missing = blocks.num_missing(request.id, end) - blocks.num_free
        missing -= self._reclaim_heads(request, missing, budget)
        for victim in reversed(self._running.requests[:]):
            if missing <= 0 or victim is request:
                break
            if blocks.owns_any_alone(victim.id):
                missing -= self._preempt(victim, request, missing, budget)
        if missing <= 0:
            return num_tokens
        room = (blocks.num_held(request.id) + blocks.num_free) * blocks.block_size - request.num_computed
        if room <= 0:
            self._preempt(request, request, missing, budget)
            return 0
        return min(num_tokens, room)

    def _preempt(self, victim: Request, by: Request, missing: int, budget: StepBudget) -> int:
        """Take a request out of the running ones. Returns how many blocks it gave; none if it steps back for itself."""
        self._running.remove(victim)
        self._preempted.add(victim)
        self._released.append(victim.id)
        victim.num_preemptions += 1
        return self._give_up_tail(victim, by, missing, budget, was_running=True)

    def _reclaim_heads(self, by: Request, missing: int, budget: StepBudget) -> int:
        """Take blocks that preempted requests kept, from the last in rank on. Returns how many became free."""
        freed = 0
        for other in reversed(self._preempted.requests):
            if freed >= missing:
                break
            if self.blocks.owns_any_alone(other.id):
                freed += self._give_up_tail(other, by, missing - freed, budget, was_running=False)
        return freed

    def _give_up_tail(self, victim: Request, by: Request, missing: int, budget: StepBudget, was_running: bool) -> int:
        keep = victim.num_computed if victim is by else self.blocks.num_tokens_without(victim.id, missing)
        lost = victim.num_computed - keep
        freed = self.blocks.truncate(victim.id, keep)
        victim.num_computed = keep
        budget.preempted.append(Preemption(victim.id, by.id, missing, freed, lost, was_running))
        return freed

    # ---------------------------------------------------------------- tokens and ends

    def _append(self, request: Request, token: int, now: float) -> tuple[FinishReason | None, int | str | None]:
        """Make a sampled token known. Returns the reason to end, and the stop token that the caller asked for, if it was one."""
        known = request.token_ids
        known.append(token)
        num_output = len(known) - request.prompt_len
        if num_output == 1:
            request.first_token_time = now
        if token in request.stop_ids and num_output >= request.params.min_tokens:
            reason, stop_reason = FinishReason.STOP, token if token in request.params.stop_token_ids else None
        elif num_output >= request.max_tokens:
            reason, stop_reason = FinishReason.LENGTH, None
        else:
            return None, None
        self._end(request, reason, stop_reason, now)
        return reason, stop_reason

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None, now: float) -> None:
        request.finish_reason, request.stop_reason, request.finish_time = reason, stop_reason, now
        if request in self._running:
            self._running.remove(request)
            self._released.append(request.id)
        elif request in self._preempted:
            self._preempted.remove(request)
        else:
            self._waiting.remove(request)
        self.blocks.release(request.id)
        del self._requests[request.id]
