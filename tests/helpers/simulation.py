"""Drives a scheduler with the ledger runner and asserts, around every step, what must always hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.blocks import BlockManager
from octavo.config import SchedulerConfig
from octavo.limits import RequestLimits, make_request
from octavo.request import FinishReason, Request, SamplingParams, fork_id, num_candidates, split_id
from octavo.scheduler.beams import BeamGroup
from octavo.scheduler.policies import POLICIES
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step import FinishedBeam, RequestUpdate, StepPlan
from tests.helpers.drafts import AnyDrafts, draft_with
from tests.helpers.ledger_runner import VOCAB, LedgerRunner, canned_candidates, canned_token


@dataclass
class Simulation:
    num_blocks: int = 64
    block_size: int = 4
    max_model_len: int = 64
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 64
    policy: str = "fcfs"
    max_passed_over: int = 16
    prefix_caching: bool = False
    fork_mode: str = "copy_on_write"
    speculative_tokens: int = 0
    any_drafts: bool = False
    """Right and wrong drafts in any number, instead of those that the scheduler finds."""
    requests: dict[int, Request] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    """By ``fork_id`` of request and sample; so is ``endings``."""
    endings: dict[int, RequestUpdate] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            policy=self.policy,  # type: ignore[arg-type]
            max_passed_over=self.max_passed_over,
            fork_mode=self.fork_mode,  # type: ignore[arg-type]
            speculative_tokens=self.speculative_tokens,
        )
        self.blocks = BlockManager(self.num_blocks, self.block_size, self.prefix_caching)
        self.scheduler = Scheduler(config, self.max_model_len, self.blocks)
        if self.any_drafts:
            draft_with(self.scheduler, AnyDrafts(config, following))
        self.runner = LedgerRunner(self.num_blocks, self.block_size, self.max_num_batched_tokens, self.max_num_seqs)
        self.limits = RequestLimits(
            VOCAB, self.max_model_len, self.num_blocks * self.block_size, block_size=self.block_size, max_num_seqs=self.max_num_seqs
        )
        self._passed: dict[int, int] = {}
        self._held = False

    def add(self, prompt: int | list[int], max_tokens: int | None = 8, **params: object) -> int:
        """Queue a request; a number makes a prompt of that length, whose tokens tell its id and their positions apart. Returns its id."""
        request_id = len(self.requests)
        if isinstance(prompt, int):
            prompt = [(request_id * 31 + position) % VOCAB for position in range(prompt)]
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        request = make_request(request_id, prompt, sampling, self.limits, float(self.steps))
        self.requests[request_id] = request
        self.outputs |= {fork_id(request_id, index): [] for index in range(sampling.num_samples)}
        self.scheduler.add(request)
        return request_id

    def live(self, request_id: int) -> set[int]:
        """Samples of a request that have not ended."""
        return {i for i in range(self.requests[request_id].params.num_samples) if fork_id(request_id, i) not in self.endings}

    def abort(self, request_id: int, sample_index: int | None = None) -> None:
        expected = self.live(request_id) if sample_index is None else self.live(request_id) & {sample_index}
        if sample_index is not None and self.requests[request_id].params.beam_width is not None:
            expected = set()
        updates = self.scheduler.abort(request_id, sample_index=sample_index, now=float(self.steps))
        assert {update.sample_index for update in updates} == expected and len(updates) == len(expected)
        for update in updates:
            self._end(update)

    def _end(self, update: RequestUpdate) -> None:
        sample = fork_id(update.request_id, update.sample_index)
        assert sample not in self.endings
        self.endings[sample] = update
        if not (group := self.scheduler._groups.get(update.request_id)) or group.forked:
            self._held = False

    def step(self, abort_before_commit: int | None = None, sample_index: int | None = None) -> StepPlan | None:
        """One step, with an abort between schedule and commit if wanted."""
        waiting = list(self.scheduler._queues.waiting)
        plan = self.scheduler.schedule(float(self.steps))
        self.steps += 1
        if plan is None:
            assert not self.scheduler.has_work, "there is work but nothing is scheduled"
            return None
        self._check_reserved(plan)
        self._check_admissions(plan, waiting)
        result = self.runner.execute(plan)
        if abort_before_commit is not None:
            self.abort(abort_before_commit, sample_index)
        for update in self.scheduler.commit(plan, result, float(self.steps)):
            sample = fork_id(update.request_id, update.sample_index)
            assert sample not in self.endings
            self.outputs[sample].extend(update.token_ids)
            assert update.beam is not None or len(update.token_ids) <= 1 + self.speculative_tokens
            if update.finish_reason is not None:
                self._end(update)
        self.scheduler.check()
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        while self.scheduler.has_work:
            assert self.steps < max_steps, "no end in sight"
            self.step()
        self.check_end()

    def check_end(self) -> None:
        """Everything has ended as it should, and nothing is left over."""
        assert self.blocks.num_free == self.num_blocks and not self.blocks.request_ids
        assert self.endings.keys() == self.outputs.keys()
        for sample, ending in self.endings.items():
            request, output = self.requests[ending.request_id], self.outputs[sample]
            if request.params.beam_width is not None:
                assert output == [] if ending.beam is None else ending.beam == expected_beam(request, ending.sample_index)
                assert ending.beam is not None or ending.finish_reason is FinishReason.ABORT
                continue
            expected, reason = expected_output(request, ending.sample_index)
            if ending.finish_reason is FinishReason.ABORT:
                assert output == expected[: len(output)]
            else:
                assert (output, ending.finish_reason) == (expected, reason)

    def _check_reserved(self, plan: StepPlan) -> None:
        assert max(plan.num_drafts, default=0) <= self.speculative_tokens
        self.blocks.check()
        assert self.blocks.stats().max_internal_slots < self.block_size
        rank = POLICIES[self.policy]
        running, preempted = list(self.scheduler._queues.running), list(self.scheduler._queues.preempted)
        assert {r.id for r in running} >= {i if self.requests[split_id(i)[0]].num_rows == 1 else split_id(i)[0] for i in plan.request_ids}
        assert self.scheduler.num_running <= self.max_num_seqs
        if not self.prefix_caching and all(r.params.num_samples == 1 for r in self.requests.values()):
            if running and preempted:
                assert max(map(rank, running)) < min(map(rank, preempted))
            assert all(self.blocks.num_held(r.id) == 0 for r in preempted[1:]), "a head was kept while a better one was touched"

    def _check_admissions(self, plan: StepPlan, waiting: list[Request]) -> None:
        rank = POLICIES[self.policy]
        self._held = self._held or any(p.was_running for p in plan.preempted)
        new, admitted = {request.id: request for request in waiting}, {admission.request_id for admission in plan.admitted}
        for admission in plan.admitted:
            request = new.get(admission.request_id)
            if request is None:
                self._held = self._held and not admission.resumed
                continue
            assert not self._held, "admitted after a preemption"
            for other in waiting:
                if other.id not in admitted and rank(other) < rank(request):
                    self._passed[other.id] = self._passed.get(other.id, 0) + 1
                    assert self._passed[other.id] <= self.max_passed_over


def following(request: Request) -> list[int]:
    """The next tokens of a request."""
    places = range(request.num_known, request.prompt_len + request.max_tokens)
    return [canned_token(request.seed, place, request.sample_index) for place in places]


def expected_output(request: Request, sample_index: int = 0) -> tuple[list[int], FinishReason]:
    """What a sample gets when it runs alone, worked out without the scheduler."""
    output: list[int] = []
    while len(output) < request.max_tokens:
        output.append(canned_token(request.seed, request.prompt_len + len(output), sample_index))
        if output[-1] in request.stop_ids and len(output) >= request.params.min_tokens:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def expected_beam(request: Request, index: int) -> FinishedBeam:
    """What a beam search gets, worked out without the scheduler: its beams as lists of tokens, nothing shared."""
    p, prompt = request.params, tuple(request.token_ids[: request.prompt_len])
    assert p.beam_width is not None
    group = BeamGroup(p.beam_width, p.length_penalty, p.early_stopping, request.stop_ids, request.max_tokens, p.min_tokens, p.logprobs)
    count = num_candidates(p.beam_width, len(request.stop_ids))
    beams = [prompt]
    while not group.done:
        following = group.advance([canned_candidates(request.seed, beam, count) for beam in beams])
        beams = [(*beams[beam.parent], beam.token_id) for beam in following]
    return group.best(p.n)[index]
