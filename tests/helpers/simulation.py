"""Drives a scheduler with the ledger runner and asserts, around every step, what must always hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.blocks import BlockManager
from octavo.config import SchedulerConfig
from octavo.request import FinishReason, Request, RequestLimits, SamplingParams, make_request
from octavo.scheduler.policies import POLICIES
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step import RequestUpdate, StepPlan
from tests.helpers.ledger_runner import VOCAB, LedgerRunner, canned_token


@dataclass
class Simulation:
    num_blocks: int = 64
    block_size: int = 4
    max_model_len: int = 64
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 64
    policy: str = "fcfs"
    max_passed_over: int = 16
    requests: dict[int, Request] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    endings: dict[int, RequestUpdate] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            policy=self.policy,  # type: ignore[arg-type]
            max_passed_over=self.max_passed_over,
        )
        self.blocks = BlockManager(self.num_blocks, self.block_size)
        self.scheduler = Scheduler(config, self.max_model_len, self.blocks)
        self.runner = LedgerRunner(self.num_blocks, self.block_size, self.max_num_batched_tokens, self.max_num_seqs)
        self.limits = RequestLimits(VOCAB, self.max_model_len, self.num_blocks * self.block_size)
        self._admitted: set[int] = set()
        self._passed: dict[int, int] = {}
        self._held = False

    def add(self, prompt_len: int, max_tokens: int | None = 8, **params: object) -> int:
        """Queue a request whose prompt tokens tell its id and their positions apart. Returns its id."""
        request_id = len(self.requests)
        prompt = [(request_id * 31 + position) % VOCAB for position in range(prompt_len)]
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        request = make_request(request_id, prompt, sampling, self.limits, float(self.steps))
        self.requests[request_id] = request
        self.outputs[request_id] = []
        self.scheduler.add(request)
        return request_id

    def abort(self, request_id: int) -> None:
        update = self.scheduler.abort(request_id, now=float(self.steps))
        assert (update is None) == (request_id in self.endings)
        if update is not None:
            self.endings[request_id] = update
            self._held = False

    def step(self, abort_before_commit: int | None = None) -> StepPlan | None:
        """One step, with an abort between schedule and commit if wanted."""
        waiting = [r for r in self.requests.values() if r.id not in self._admitted and r.id not in self.endings]
        plan = self.scheduler.schedule(float(self.steps))
        self.steps += 1
        if plan is None:
            assert not self.scheduler.has_work, "there is work but nothing is scheduled"
            return None
        self._check_reserved(plan)
        self._check_admissions(plan, waiting)
        result = self.runner.execute(plan)
        if abort_before_commit is not None:
            self.abort(abort_before_commit)
        for update in self.scheduler.commit(plan, result, float(self.steps)):
            assert update.request_id not in self.endings
            self.outputs[update.request_id].extend(update.token_ids)
            if update.finish_reason is not None:
                self.endings[update.request_id] = update
                self._held = False
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
        assert self.endings.keys() == self.requests.keys()
        for request_id, ending in self.endings.items():
            expected, reason = expected_output(self.requests[request_id])
            if ending.finish_reason is FinishReason.ABORT:
                assert self.outputs[request_id] == expected[: len(self.outputs[request_id])]
            else:
                assert (self.outputs[request_id], ending.finish_reason) == (expected, reason)

    def _check_reserved(self, plan: StepPlan) -> None:
        self.blocks.check()
        assert self.blocks.stats().max_internal_slots < self.block_size
        rank = POLICIES[self.policy]
        running, preempted = list(self.scheduler._running), list(self.scheduler._preempted)
        assert {r.id for r in running} >= set(plan.request_ids)
        assert len(running) <= self.max_num_seqs
        if running and preempted:
            assert max(map(rank, running)) < min(map(rank, preempted))
        assert all(self.blocks.num_held(request.id) == 0 for request in preempted[1:]), "a head was kept while a better one was touched"

    def _check_admissions(self, plan: StepPlan, waiting: list[Request]) -> None:
        rank = POLICIES[self.policy]
        self._held = self._held or any(p.was_running for p in plan.preempted)
        for admission in plan.admitted:
            request = self.requests[admission.request_id]
            if request.id in self._admitted:
                self._held = False
                continue
            assert not self._held, "admitted after a preemption"
            self._admitted.add(request.id)
            for other in waiting:
                if other.id not in self._admitted and rank(other) < rank(request):
                    self._passed[other.id] = self._passed.get(other.id, 0) + 1
                    assert self._passed[other.id] <= self.max_passed_over


def expected_output(request: Request) -> tuple[list[int], FinishReason]:
    """What a request gets when it runs alone, worked out without the scheduler."""
    output: list[int] = []
    while len(output) < request.max_tokens:
        output.append(canned_token(request.seed, request.prompt_len + len(output)))
        if output[-1] in request.stop_ids and len(output) >= request.params.min_tokens:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH
