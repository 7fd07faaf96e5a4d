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

from octavo.blocks import BlockManager, blocks_for
from octavo.config import SchedulerConfig
from octavo.errors import EngineError, MemoryConfigError
from octavo.request import FinishReason, Request, split_id
from octavo.scheduler.admission import StepBudget
from octavo.scheduler.beam_search import BeamSearch
from octavo.scheduler.filling import StepFiller
from octavo.scheduler.groups import SampleGroup
from octavo.scheduler.policies import POLICIES
from octavo.scheduler.queues import Queues
from octavo.scheduler.room import RoomMaker
from octavo.scheduler.speculation import Speculator, num_accepted
from octavo.scheduler.step import RequestUpdate, StepPlan, StepResult, TokenLogprobs

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
        self._requests: dict[int, Request] = {}
        self._groups: dict[int, SampleGroup] = {}
        """Requests of several samples, by the id that their caller knows."""
        self._queues = Queues(POLICIES[config.policy])
        self._room = RoomMaker(blocks, self._queues)
        self._speculator = Speculator(config)
        self._filler = StepFiller(config, self._queues, blocks, self._room, self._speculator)
        self._step = 0
        self._scheduled_time = 0.0
        """When the last step was scheduled."""

    @property
    def num_running(self) -> int:
        """Requests that run, each sample and each beam for itself."""
        return self._queues.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that do not run: new, preempted and just forked ones."""
        return len(self._queues.waiting) + len(self._queues.preempted)

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
            self._queues.searches[request.id] = BeamSearch(request)
        if request.num_samples > 1:
            apart = self.config.fork_mode == "recompute"
            self._groups[request.id] = SampleGroup(request.id, request.num_samples, forked=apart)
            if apart:
                samples += [request.fork(number) for number in range(1, request.num_samples)]
                request.num_samples = 1
        for sample in samples:
            self._requests[sample.id] = sample
            self._queues.waiting.add(sample)

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
        if (search := self._queues.searches.get(request_id)) is not None:
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
            updates.append(RequestUpdate(request_id, index, (), (), (), reason, stop_reason, metrics, error))
        return updates

    def abort(self, request_id: int, *, sample_index: int | None = None, now: float) -> list[RequestUpdate]:
        """End a request, or one sample of it, because its caller gave it up; see ``finish``."""
        return self.finish(request_id, FinishReason.ABORT, sample_index=sample_index, now=now)

    def schedule(self, now: float) -> StepPlan | None:
        """Decide the next step and reserve its blocks. None if there is nothing to do."""
        budget = StepBudget(self.config.max_num_batched_tokens)
        self._filler.fill(budget, now)
        plan = budget.plan(self._step, self._room.released, self.blocks.copies)
        if plan is not None:
            self._step += 1
            self._scheduled_time = now
            self._room.released.clear()
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestUpdate]:
        """Take over what a step computed. Requests that ended since it was scheduled are ignored."""
        assert len(result.token_ids) == sum(plan.sampled), f"{len(result.token_ids)} tokens for {sum(plan.sampled)} sampled ones"
        self.blocks.end_step()
        self._speculator.observe(plan, now - self._scheduled_time)
        updates: list[RequestUpdate] = []
        requests, tokens, logprobs, prompt_logprobs = self._requests, result.token_ids, result.logprobs, result.prompt_logprobs
        first, end, searches = 0, 0, self._queues.searches
        drafted = plan.num_drafts or [0] * plan.num_requests
        columns = zip(plan.request_ids, plan.num_scheduled, plan.sampled, drafted, strict=True)
        for request_id, num_scheduled, num_samples, num_drafts in columns:
            start, first = first, first + num_samples
            end += num_scheduled
            prompt = tuple(prompt_logprobs.get(request_id, ())) if prompt_logprobs else ()
            if searches and (search := searches.get(split_id(request_id)[0])) is not None:
                found = logprobs.get(start) if num_samples else None
                updates += self._commit_beam(search, search.beam(request_id), num_scheduled, found, bool(num_samples), prompt, now)
                continue
            request = requests.get(request_id)
            if request is None:
                continue
            request.num_computed += num_scheduled
            chosen = tuple(logprobs[index] for index in range(start, first) if index in logprobs) if logprobs else ()
            if num_drafts:
                drafts, sampled = plan.token_ids[end - num_drafts : end], tuple(tokens[start:first])
                updates.append(self._append(request, sampled[: num_accepted(drafts, sampled) + 1], chosen, prompt, now))
            elif num_samples == 1:
                updates.append(self._append(request, (tokens[start],), chosen, prompt, now))
            elif num_samples:
                updates += self._fork(request, tuple(tokens[start:first]), chosen, prompt, now)
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
        queues = (self._queues.waiting, self._queues.running, self._queues.preempted)
        assert sum(map(len, queues)) == len(self._requests), "a request is in no queue or in two"
        parts = {part.id: part for request in self._requests.values() for part in self._queues.parts(request)}
        for part in parts.values():
            covered = self.blocks.num_tokens(part.id)
            assert covered == part.num_computed, f"request {part.id} computed {part.num_computed} tokens, its table covers {covered}"
        assert not any(request.num_computed for request in self._queues.waiting), "a waiting request holds blocks"
        ended = self.blocks.request_ids - parts.keys()
        assert not ended, f"blocks are held for requests that have ended: {sorted(ended)}"
        assert self._queues.searches.keys() <= self._requests.keys(), "a beam search was not forgotten"
        for group in self._groups.values():
            lost = [index for index in group.live if group.fork_of(index) not in self._requests]
            assert group.live and not lost, f"samples {lost} of request {group.request_id} are lost"

    # ---------------------------------------------------------------- tokens, forks and ends

    def _append(
        self, request: Request, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], prompt: PromptLogprobs, now: float
    ) -> RequestUpdate:
        """Make sampled tokens known, up to the one that ends the request, if any. What drafts computed behind them is given up."""
        known, kept, reason = request.token_ids, 0, None
        before = len(known) - request.prompt_len
        for token in tokens:
            if token < 0:
                reason = FinishReason.ERROR
                break
            known.append(token)
            kept += 1
            if token in request.stop_ids and before + kept >= request.params.min_tokens:
                reason = FinishReason.STOP
                break
            if before + kept >= request.max_tokens:
                reason = FinishReason.LENGTH
                break
        if before == 0 and kept:
            request.first_token_time = now
        if request.num_computed >= len(known):
            request.num_computed = len(known) - 1
            self.blocks.truncate(request.id, request.num_computed)
        if reason is None:
            return RequestUpdate(request.group_id, request.sample_index, tokens, logprobs[:kept], prompt)
        return self._last_update(request, tokens[:kept], logprobs[:kept], prompt, reason, now)

    def _last_update(
        self,
        request: Request,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        prompt: PromptLogprobs,
        reason: FinishReason,
        now: float,
    ) -> RequestUpdate:
        """End a request with the tokens just made known."""
        last = request.token_ids[-1]
        stop_reason = last if reason is FinishReason.STOP and last in request.params.stop_token_ids else None
        self._end(request, reason, stop_reason, now)
        error = _no_token() if reason is FinishReason.ERROR else None
        metrics = request.metrics
        return RequestUpdate(request.group_id, request.sample_index, tokens, logprobs, prompt, reason, stop_reason, metrics, error)

    def _fork(
        self, request: Request, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], prompt: PromptLogprobs, now: float
    ) -> list[RequestUpdate]:
        """The prompt of a request is computed: from now on each sample, with its first token, is a request of its own."""
        group = self._groups[request.id]
        group.forked, request.num_samples = True, 1
        samples = {index: request.fork(index) if index else request for index in sorted(group.live)}
        for index, sample in samples.items():
            if index:
                self.blocks.fork(request.id, sample.id, sample.token_ids)
                self._requests[sample.id] = sample
                self._queues.preempted.add(sample)
        if 0 not in samples:
            self._end(request, FinishReason.ABORT, None, now)
        updates = []
        for index, sample in samples.items():
            updates.append(self._append(sample, tokens[index : index + 1], logprobs[index : index + 1], prompt, now))
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
            return updates + self._give_up_search(search, FinishReason.ERROR, None, now, _no_token())
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
        updates = search.outputs()
        reason = updates[0].finish_reason
        assert reason is not None
        self._end(request, reason, None, now)
        return [update._replace(metrics=metrics) for update, metrics in zip(updates, search.metrics(), strict=True)]

    def _give_up_search(
        self, search: BeamSearch, reason: FinishReason, stop_reason: int | str | None, now: float, error: EngineError | None
    ) -> list[RequestUpdate]:
        request = search.request
        self._end(request, reason, stop_reason, now)
        return [
            RequestUpdate(request.id, index, (), (), (), reason, stop_reason, metrics, error)
            for index, metrics in enumerate(search.metrics())
        ]  # fmt: skip

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None, now: float) -> None:
        request.finish_reason, request.stop_reason, request.finish_time = reason, stop_reason, now
        parts = self._queues.parts(request)
        if request in self._queues.running:
            self._queues.running.remove(request)
            self._room.released += [part.id for part in parts]
        elif request in self._queues.preempted:
            self._queues.preempted.remove(request)
        else:
            self._queues.waiting.remove(request)
        for part in parts:
            self.blocks.release(part.id, part.num_computed)
        self._room.held = False
        del self._requests[request.id]
        self._speculator.forget(request.id)
        self._queues.searches.pop(request.id, None)
        if (group := self._groups.get(request.group_id)) is not None:
            group.live.discard(request.sample_index)
            if not group.live:
                del self._groups[group.request_id]


def _no_token() -> EngineError:
    return EngineError(
        "no token can be chosen: the request forbids all of them, or the logits are not numbers and the weights may be damaged"
    )
