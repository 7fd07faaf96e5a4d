"""Stage 2 of 7: the scheduler. Before it: ``request``. After it: ``blocks``, then ``runner``.

A request has tokens known and tokens computed; each step lets the second catch up with the first under a token
budget. A long prompt in chunks, one token after another, and a fresh start after preemption are the same case:

    waiting --admit--> running --preempt--> preempted
      ^                  | ^                  |   ^
    add()             finish `----resume------'  fork
                         v
                    (forgotten)

A request of several samples forks when its prompt is computed: the first sample runs on in its place, the others begin
as preempted ones that hold the shared blocks, and are ordinary requests from then on. The beams of a beam search stand
in the queues as one request (``beam_search``).

Why all requests finish: ranks are fixed, a request takes blocks only from those that rank behind it (``room``), and the
whole cache holds a request of ``max_model_len``. So the first in rank among the running always goes on; and where nothing
runs, the first of the preempted ones takes what it needs.
"""

from __future__ import annotations

from array import array

from octavo.blocks import BlockManager, blocks_for
from octavo.config import SchedulerConfig
from octavo.errors import EngineError, MemoryConfigError
from octavo.request import FinishReason, Request, split_id
from octavo.scheduler.admission import Passing, StepBudget
from octavo.scheduler.beam_search import BeamSearch
from octavo.scheduler.groups import SampleGroup
from octavo.scheduler.policies import POLICIES, RequestQueue
from octavo.scheduler.room import RoomMaker
from octavo.scheduler.step import FinishedBeam, RequestUpdate, StepPlan, StepResult, TokenLogprobs

PromptLogprobs = tuple[tuple[int, TokenLogprobs], ...]
"""(prompt position, its log-probabilities)"""


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
        self._groups: dict[int, SampleGroup] = {}
        """Requests of several samples, by the id that their caller knows."""
        self._searches: dict[int, BeamSearch] = {}
        """Requests with beams, in the same way."""
        self._waiting = RequestQueue(policy)
        self._running = RequestQueue(policy)
        self._preempted = RequestQueue(policy)
        self._room = RoomMaker(blocks, self._running, self._preempted, self._searches)
        self._step = 0

    @property
    def num_running(self) -> int:
        """Requests that run, each sample and each beam for itself."""
        return len(self._running) + sum(len(s.beams) - 1 for s in self._searches.values() if s.request in self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run: new, preempted and just forked ones."""
        return len(self._waiting) + len(self._preempted)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def is_live(self, request_id: int) -> bool:
        """Whether any sample of this request has not ended."""
        return request_id in self._groups or request_id in self._requests

    def add(self, request: Request) -> None:
        """Queue a new request."""
        assert request.id not in self._requests, f"request {request.id} was added before"
        assert request.prompt_len + request.max_tokens <= self.max_model_len, f"request {request.id} may never fit"
        samples = [request]
        if request.params.beam_width is not None:
            self._searches[request.id] = BeamSearch(request)
        if request.num_samples > 1:
            apart = self.config.fork_mode == "recompute"
            self._groups[request.id] = SampleGroup(request.id, request.num_samples, forked=apart)
            if apart:
                samples += [request.fork(number) for number in range(1, request.num_samples)]
                request.num_samples = 1
        for sample in samples:
            self._requests[sample.id] = sample
            self._waiting.add(sample)

    def finish(
        self,
        request_id: int,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        *,
        sample_index: int | None = None,
        now: float,
        error: EngineError | None = None,
    ) -> list[RequestUpdate]:
        """End a request, or one sample of it, at any moment, wherever it is. Returns the last update of each that had not ended before.

        Outputs of a beam search end together; there is no ``sample_index`` to end one of them by.
        """
        if (search := self._searches.get(request_id)) is not None:
            return self._give_up_search(search, reason, stop_reason, now, error) if sample_index is None else []
        group = self._groups.get(request_id)
        live = group.live if group is not None else {0} if request_id in self._requests else set()
        updates = []
        for index in sorted(live) if sample_index is None else live & {sample_index}:
            request = self._requests[group.fork_of(index) if group is not None else request_id]
            if group is not None:
                group.live.remove(index)
            if group is None or group.forked or not group.live:  # else the others still need the prompt
                self._end(request, reason, stop_reason, now)
            metrics = request.metrics._replace(finish_time=now)
            updates.append(RequestUpdate(request_id, index, (), None, (), reason, stop_reason, metrics, error))
        return updates

    def abort(self, request_id: int, *, sample_index: int | None = None, now: float) -> list[RequestUpdate]:
        """End a request, or one sample of it, because its caller gave it up; see ``finish``."""
        return self.finish(request_id, FinishReason.ABORT, sample_index=sample_index, now=now)

    def schedule(self, now: float) -> StepPlan | None:
        """Decide the next step and reserve its blocks. None if there is nothing to do."""
        budget = StepBudget(self.config.max_num_batched_tokens)
        self._continue_running(budget)
        if not budget.preempted or not self._running:
            self._resume_preempted(budget, now)
            if not self._room.held:
                self._admit_waiting(budget, now)
        plan = budget.plan(self._step, self._room.released, self.blocks.copies)
        if plan is not None:
            self._step += 1
            self._room.released.clear()
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestUpdate]:
        """Take over what a step computed. Requests that ended since it was scheduled are ignored."""
        assert len(result.token_ids) == sum(plan.sampled), f"{len(result.token_ids)} tokens for {sum(plan.sampled)} sampled ones"
        self.blocks.end_step()
        updates: list[RequestUpdate] = []
        requests, tokens, logprobs, prompt_logprobs = self._requests, result.token_ids, result.logprobs, result.prompt_logprobs
        first, searches = 0, self._searches
        for request_id, num_scheduled, num_samples in zip(plan.request_ids, plan.num_scheduled, plan.sampled, strict=True):
            start, first = first, first + num_samples
            prompt = tuple(prompt_logprobs.get(request_id, ())) if prompt_logprobs else ()
            if searches and (search := searches.get(split_id(request_id)[0])) is not None:
                found = logprobs.get(start) if num_samples else None
                updates += self._commit_beam(search, search.beam(request_id), num_scheduled, found, bool(num_samples), prompt, now)
                continue
            request = requests.get(request_id)
            if request is None:
                continue
            request.num_computed += num_scheduled
            if num_samples == 1:
                updates.append(self._append(request, tokens[start], logprobs.get(start), prompt, now))
            elif num_samples > 1:
                chosen = [logprobs.get(index) for index in range(start, first)]
                updates += self._fork(request, tokens[start:first], chosen, prompt, now)
            elif prompt:
                updates.append(RequestUpdate(request.group_id, request.sample_index, prompt_logprobs=prompt))
        return updates

    def fail(self, plan: StepPlan, error: EngineError, now: float) -> list[RequestUpdate]:
        """End the requests of a step that the runner could not execute; all others go on."""
        self.blocks.end_step(failed=True)
        self._room.released[:0] = plan.released
        updates = []
        for request_id, number in map(split_id, plan.request_ids):
            group = self._groups.get(request_id)
            sample_index = number if group is not None and group.forked else None
            updates += self.finish(request_id, FinishReason.ERROR, sample_index=sample_index, now=now, error=error)
        return updates

    def check(self) -> None:
        """Prove, between two steps, that blocks and queues agree; AssertionError says where they do not."""
        self.blocks.check()
        assert not self.blocks.copies, "copies are planned between two steps"
        queues = (self._waiting, self._running, self._preempted)
        assert sum(map(len, queues)) == len(self._requests), "a request is in no queue or in two"
        parts = {part.id: part for request in self._requests.values() for part in self._parts(request)}
        for part in parts.values():
            covered = self.blocks.num_tokens(part.id)
            assert covered == part.num_computed, f"request {part.id} computed {part.num_computed} tokens, its table covers {covered}"
        assert not any(request.num_computed for request in self._waiting), "a waiting request holds blocks"
        ended = self.blocks.request_ids - parts.keys()
        assert not ended, f"blocks are held for requests that have ended: {sorted(ended)}"
        assert self._searches.keys() <= self._requests.keys(), "a beam search was not forgotten"
        for group in self._groups.values():
            lost = [index for index in group.live if group.fork_of(index) not in self._requests]
            assert group.live and not lost, f"samples {lost} of request {group.request_id} are lost"

    # ---------------------------------------------------------------- one step: running, preempted, waiting

    def _continue_running(self, budget: StepBudget) -> None:
        running, blocks, reserve, add = self._running.requests, self.blocks, self.blocks.reserve, budget.add
        searches = self._searches
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
        blocks, request = self.blocks, search.request
        takes = search.takes(blocks, budget.num_tokens_left, num_behind)
        ends = {beam.id: beam.num_computed + num_tokens for beam, num_tokens in takes}
        missing = self._room.make(request, lambda: blocks.num_missing_together(ends), budget)
        if missing > 0:
            self._room.step_back(request, missing, budget)
            return False
        for beam, num_tokens in takes:
            new_blocks = blocks.reserve(beam.id, ends[beam.id])
            assert new_blocks is not None, f"beam {split_id(beam.id)} was found to fit but does not"
            if beam.id in search.placed:
                budget.add(beam, num_tokens, new_blocks, bool(new_blocks) and new_blocks[0] in blocks.copies)
            else:
                resumed = request.num_preemptions > 0 and not search.placed
                budget.admit(beam, num_tokens, blocks.block_ids(beam.id), resumed)
                search.placed.add(beam.id)
        return True

    def _resume_preempted(self, budget: StepBudget, now: float) -> None:
        """In order of rank, as long as they fit. Where nothing runs, the first one takes what it needs from those behind it."""
        while self._preempted and self._can_take(self._preempted.requests[0], budget):
            request = self._preempted.requests[0]
            if not self._hold(request):
                if self._running:
                    return
                self._room.make(request, lambda request=request: self._num_needed(request), budget)  # type: ignore[misc]
                held = self._hold(request)
                assert held, f"request {request.id} may take everything but does not fit"
            self._preempted.remove(request)
            if request.num_preemptions:
                self._room.held = False
            self._start(request, budget, now)

    def _admit_waiting(self, budget: StepBudget, now: float) -> None:
        passing = Passing(self.config.max_passed_over)
        index = 0
        while index < len(self._waiting) and passing.allowed:
            request = self._waiting.requests[index]
            if not self._can_take(request, budget) or not self._ranks_before_preempted(request):
                return
            if not self._hold(request):
                passing.skip(request)
                index += 1
                continue
            passing.admitted()
            self._waiting.remove(request)
            request.num_cached_tokens = request.num_computed
            self._start(request, budget, now)

    def _can_take(self, request: Request, budget: StepBudget) -> bool:
        """Whether the step has room for one more request, but for its blocks."""
        return (
            budget.num_tokens_left > 0
            and self._num_rows + request.num_rows <= self.config.max_num_seqs
            and (request.num_samples == 1 or request.num_samples - 1 <= budget.num_forks_left)
        )

    @property
    def _num_rows(self) -> int:
        """Rows of the runner that are taken, or kept for beams to come."""
        return len(self._running) + sum(s.request.num_rows - 1 for s in self._searches.values() if s.request in self._running)

    def _ranks_before_preempted(self, request: Request) -> bool:
        if not self._preempted:
            return True
        policy = self._preempted.policy
        return policy(request) < policy(self._preempted.requests[0])

    def _parts(self, request: Request) -> list[Request]:
        """Whose tokens and blocks stand behind a request in a queue: its own, or its beams'."""
        search = self._searches.get(request.id)
        return [request] if search is None else search.beams

    def _num_needed(self, request: Request) -> int:
        """Free blocks that it takes to compute all known tokens."""
        search = self._searches.get(request.id)
        if search is not None:
            return search.num_missing(self.blocks)
        return self.blocks.num_missing(request.id, len(request.token_ids))

    def _hold(self, request: Request) -> bool:
        """Take hold of what is cached of a request's tokens, if all of them fit then."""
        search = self._searches.get(request.id)
        if search is None or len(search.beams) == 1:
            return self._hold_part(search.beams[0] if search is not None else request)
        if search.num_missing(self.blocks) > self.blocks.num_free:
            return False
        waiting = {join.beam.id for join in search.rejoins()}
        return all(self._hold_part(beam, copies=False) for beam in search.beams if beam.id not in waiting)

    def _hold_part(self, request: Request, copies: bool = True) -> bool:
        params = request.params
        # Log-probabilities of the prompt take its logits, so it is computed; once there is output, they have been delivered.
        reads = params.cache_prefix and (params.prompt_logprobs is None or request.num_output > 0)
        found = self.blocks.admit(request.id, request.token_ids, params.cache_salt, reads, params.cache_prefix, copies)
        if found is not None:
            request.num_computed = found
        return found is not None

    def _start(self, request: Request, budget: StepBudget, now: float) -> None:
        if request.admitted_time is None:
            request.admitted_time = now
        self._running.add(request)
        if (search := self._searches.get(request.id)) is not None:
            fits = self._continue_beams(search, budget)
            assert fits, f"the beams of request {request.id} were found to fit but do not"
            return
        num_tokens = min(len(request.token_ids) - request.num_computed, budget.num_tokens_left)
        new_blocks = self.blocks.reserve(request.id, request.num_computed + num_tokens)
        assert new_blocks is not None, f"request {request.id} was found to fit but does not"
        budget.admit(request, num_tokens, self.blocks.block_ids(request.id), request.num_preemptions > 0)

    # ---------------------------------------------------------------- tokens, forks and ends

    def _append(self, request: Request, token: int, logprobs: TokenLogprobs | None, prompt: PromptLogprobs, now: float) -> RequestUpdate:
        """Make a sampled token known; it may end the request."""
        known = request.token_ids
        known.append(token)
        num_output = len(known) - request.prompt_len
        if num_output == 1:
            request.first_token_time = now
        reason: FinishReason | None = None
        stop_reason: int | None = None
        if token in request.stop_ids and num_output >= request.params.min_tokens:
            reason, stop_reason = FinishReason.STOP, token if token in request.params.stop_token_ids else None
        elif num_output >= request.max_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            return RequestUpdate(request.group_id, request.sample_index, (token,), logprobs, prompt)
        self._end(request, reason, stop_reason, now)
        return RequestUpdate(request.group_id, request.sample_index, (token,), logprobs, prompt, reason, stop_reason, request.metrics)

    def _fork(
        self, request: Request, tokens: array[int], logprobs: list[TokenLogprobs | None], prompt: PromptLogprobs, now: float
    ) -> list[RequestUpdate]:
        """The prompt of a request is computed: from now on each sample, with its first token, is a request of its own."""
        group = self._groups[request.id]
        group.forked, request.num_samples = True, 1
        samples = {index: request.fork(index) if index else request for index in sorted(group.live)}
        for index, sample in samples.items():
            if index:
                self.blocks.fork(request.id, sample.id, sample.token_ids)
                self._requests[sample.id] = sample
                self._preempted.add(sample)
        if 0 not in samples:
            self._end(request, FinishReason.ABORT, None, now)
        updates = []
        for index, sample in samples.items():
            updates.append(self._append(sample, tokens[index], logprobs[index], prompt, now))
            prompt = ()
        return updates

    def _commit_beam(
        self,
        search: BeamSearch,
        beam: Request,
        num_scheduled: int,
        found: TokenLogprobs | None,
        sampled: bool,
        prompt: PromptLogprobs,
        now: float,
    ) -> list[RequestUpdate]:
        """Take over what a step computed of one beam; the last one of its search moves all of them on."""
        beam.num_computed += num_scheduled
        updates = [RequestUpdate(search.request.id, prompt_logprobs=prompt)] if prompt else []
        if not sampled:
            return updates
        if found is None:
            error = EngineError("no token can be chosen for a beam, as its logits are not numbers: the weights may be damaged")
            return updates + self._give_up_search(search, FinishReason.ERROR, None, now, error)
        search.offer(beam.id, found)
        return updates + (self._advance(search, now) if search.ready else [])

    def _advance(self, search: BeamSearch, now: float) -> list[RequestUpdate]:
        """One step of a beam search. Beams that end give up their blocks at once."""
        request = search.request
        if request.first_token_time is None:
            request.first_token_time = now
        for beam in search.advance(self.blocks):
            self.blocks.release(beam.id, beam.num_computed)
            self._room.released.append(beam.id)
        if not search.done:
            return []
        best = search.best(request.params.n)
        self._end(request, best[0].finish_reason, None, now)
        return [self._beam_update(request, index, beam) for index, beam in enumerate(best)]

    def _beam_update(self, request: Request, index: int, beam: FinishedBeam) -> RequestUpdate:
        last, metrics = beam.token_ids[-1], request.metrics
        asked = beam.finish_reason is FinishReason.STOP and last in request.params.stop_token_ids
        if index:
            metrics = metrics._replace(num_preemptions=0)  # counted once
        return RequestUpdate(
            request.id, index, beam.token_ids, None, (), beam.finish_reason, last if asked else None, metrics, beam=beam
        )  # fmt: skip

    def _give_up_search(
        self, search: BeamSearch, reason: FinishReason, stop_reason: int | str | None, now: float, error: EngineError | None
    ) -> list[RequestUpdate]:
        request = search.request
        self._end(request, reason, stop_reason, now)
        return [
            RequestUpdate(request.id, index, (), None, (), reason, stop_reason, request.metrics, error)
            for index in range(request.params.n)
        ]  # fmt: skip

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None, now: float) -> None:
        request.finish_reason, request.stop_reason, request.finish_time = reason, stop_reason, now
        parts = self._parts(request)
        if request in self._running:
            self._running.remove(request)
            self._room.released += [part.id for part in parts]
        elif request in self._preempted:
            self._preempted.remove(request)
        else:
            self._waiting.remove(request)
        for part in parts:
            self.blocks.release(part.id, part.num_computed)
        self._room.held = False
        del self._requests[request.id]
        self._searches.pop(request.id, None)
        if (group := self._groups.get(request.group_id)) is not None:
            group.live.discard(request.sample_index)
            if not group.live:
                del self._groups[group.request_id]
