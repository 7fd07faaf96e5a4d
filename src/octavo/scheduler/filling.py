"""Stage 2 of 7: fills a step. Before it: ``scheduler``. After it: ``room``, ``blocks``.

Running requests first, in order of rank, then preempted ones, then waiting ones, until tokens, rows or blocks are used up.
Drafts come last and take what nobody else wants: they never delay, preempt or hold back anybody.
"""

from __future__ import annotations

from octavo.blocks import BlockManager
from octavo.config import SchedulerConfig
from octavo.request import Request
from octavo.scheduler.admission import Passing, StepBudget, hold_cached
from octavo.scheduler.beam_search import BeamSearch
from octavo.scheduler.queues import Queues
from octavo.scheduler.room import RoomMaker
from octavo.scheduler.speculation import Speculator


class StepFiller:
    """Moves requests between the queues and puts their next tokens into a plan."""

    def __init__(self, config: SchedulerConfig, queues: Queues, blocks: BlockManager, room: RoomMaker, speculator: Speculator) -> None:
        self._config = config
        self._queues = queues
        self._blocks = blocks
        self._room = room
        self._speculator = speculator

    def fill(self, budget: StepBudget, now: float) -> None:
        """Decide what a step computes and reserve its blocks."""
        self._continue_running(budget)
        if not budget.preempted or not self._queues.running:
            self._resume_preempted(budget, now)
            if not self._room.held:
                self._admit_waiting(budget, now)
        if self._speculator.begin_step(budget.num_requests):
            self._add_drafts(budget)

    def _add_drafts(self, budget: StepBudget) -> None:
        """In order of rank, into the tokens that the step has left and the blocks that are free; none where there is no room."""
        for place, request in budget.decodes(self._queues.running):
            drafts = self._speculator.drafts(request, budget.num_tokens_left)
            if drafts and (drafts := drafts[: self._blocks.num_room(request.id)]):
                new_blocks = self._blocks.reserve(request.id, len(request.token_ids) + len(drafts))
                assert new_blocks is not None, f"drafts of request {request.id} were found to fit but do not"
                budget.add_drafts(place, drafts, new_blocks)

    def _continue_running(self, budget: StepBudget) -> None:
        running, blocks, reserve, add = self._queues.running.requests, self._blocks, self._blocks.reserve, budget.add
        searches = self._queues.searches
        index = 0
        while index < len(running) and budget.num_tokens_left > 0:
            request = running[index]
            index += 1
            if searches and (search := searches.get(request.id)) is not None:
                if not self._continue_beams(search, budget, len(running) - index):
                    return
                continue
            start = request.num_computed
            num_tokens = len(request.token_ids) - start
            if num_tokens > 1:
                # Those behind get at least one token each, so that a long prompt does not stop the others' output.
                num_tokens = min(num_tokens, max(1, budget.num_tokens_left - (len(running) - index)))
            if request.num_samples > 1:
                num_tokens = budget.without_fork(request, num_tokens)
                if num_tokens == 0:
                    continue
            new_blocks = reserve(request.id, start + num_tokens)
            if new_blocks is None:
                num_tokens = self._room.make_for_running(request, num_tokens, budget)
                if num_tokens <= 0:
                    return
                new_blocks = reserve(request.id, start + num_tokens)
                assert new_blocks is not None
            if new_blocks:
                add(request, num_tokens, new_blocks, new_blocks[0] in blocks.copies)
            else:
                add(request, num_tokens)

    def _continue_beams(self, search: BeamSearch, budget: StepBudget, num_behind: int = 0) -> bool:
        """Schedule beams, all or none of those that can compute anything. False if there was no room and they step back."""
        takes = search.takes(self._blocks, budget.num_tokens_left, num_behind)
        if not self._room.make_for_beams(search, takes, budget):
            return False
        search.schedule(takes, self._blocks, budget)
        return True

    def _resume_preempted(self, budget: StepBudget, now: float) -> None:
        """In order of rank, as long as they fit. Where nothing runs, the first one takes what it needs from those behind it."""
        while self._queues.preempted and self._can_take(self._queues.preempted.requests[0], budget):
            request = self._queues.preempted.requests[0]
            if not self._hold(request):
                if self._queues.running:
                    return
                self._room.make(request, lambda request=request: self._num_needed(request), budget)  # type: ignore[misc]
                held = self._hold(request)
                assert held, f"request {request.id} may take everything but does not fit"
            self._queues.preempted.remove(request)
            if request.num_preemptions:
                self._room.held = False
            self._start(request, budget, now)

    def _admit_waiting(self, budget: StepBudget, now: float) -> None:
        passing = Passing(self._config.max_passed_over)
        index = 0
        while index < len(self._queues.waiting) and passing.allowed:
            request = self._queues.waiting.requests[index]
            if not self._can_take(request, budget) or not self._ranks_before_preempted(request):
                return
            if not self._hold(request):
                passing.skip(request)
                index += 1
                continue
            passing.admitted()
            self._queues.waiting.remove(request)
            request.num_cached_tokens = request.num_computed
            self._start(request, budget, now)

    def _can_take(self, request: Request, budget: StepBudget) -> bool:
        """Whether the step has room for one more request, but for its blocks."""
        return (
            budget.num_tokens_left > 0
            and self._queues.num_rows + request.num_rows <= self._config.max_num_seqs
            and (request.num_samples == 1 or request.num_samples - 1 <= budget.num_forks_left)
        )

    def _ranks_before_preempted(self, request: Request) -> bool:
        if not self._queues.preempted:
            return True
        policy = self._queues.preempted.policy
        return policy(request) < policy(self._queues.preempted.requests[0])

    def _num_needed(self, request: Request) -> int:
        """Free blocks that it takes to compute all known tokens."""
        search = self._queues.searches.get(request.id)
        if search is not None:
            return search.num_missing(self._blocks)
        return self._blocks.num_missing(request.id, len(request.token_ids))

    def _hold(self, request: Request) -> bool:
        """Take hold of what is cached of a request's tokens, if all of them fit then."""
        search = self._queues.searches.get(request.id)
        return hold_cached(request, self._blocks) if search is None else search.hold(self._blocks)

    def _start(self, request: Request, budget: StepBudget, now: float) -> None:
        if request.admitted_time is None:
            request.admitted_time = now
        self._queues.running.add(request)
        if (search := self._queues.searches.get(request.id)) is not None:
            fits = self._continue_beams(search, budget)
            assert fits, f"the beams of request {request.id} were found to fit but do not"
            return
        num_tokens = min(len(request.token_ids) - request.num_computed, budget.num_tokens_left)
        new_blocks = self._blocks.reserve(request.id, request.num_computed + num_tokens)
        assert new_blocks is not None, f"request {request.id} was found to fit but does not"
        budget.admit(request, num_tokens, self._blocks.block_ids(request.id), request.num_preemptions > 0)
