"""The loop with a runner that books instead of computing: events, figures, failures, aborts."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from octavo.blocks import BlockManager
from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore, Runner
from octavo.engine.events import Admitted, Arrived, Event, EventLog, Finished, FirstToken, Preempted
from octavo.errors import EngineError, InvalidRequestError
from octavo.limits import RequestLimits
from octavo.request import FinishReason, SamplingParams
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step import StepPlan, StepResult
from tests.helpers.ledger_runner import VOCAB, LedgerRunner, canned_token


def make_core(runner: Runner | None = None, num_blocks: int = 16, prefix_caching: bool = False, **config: int) -> EngineCore:
    blocks = BlockManager(num_blocks, 4, prefix_caching)
    scheduler = Scheduler(SchedulerConfig(**config), 32, blocks)  # type: ignore[arg-type]
    ticks = itertools.count()
    limits = RequestLimits(VOCAB, 32, num_blocks * 4, frozenset({VOCAB - 1}))
    return EngineCore(scheduler, runner or LedgerRunner(num_blocks, 4), limits, lambda: float(next(ticks)), EventLog())


def run(core: EngineCore) -> dict[int, list[int]]:
    """Step to the end. Returns the output of each request."""
    outputs: dict[int, list[int]] = {}
    while core.has_work:
        for update in core.step():
            outputs.setdefault(update.request_id, []).extend(update.token_ids)
        core.check()
    return outputs


def test_requests_run_together_and_each_gets_its_own_tokens() -> None:
    core = make_core()
    ids = [core.add_request([1] * n, SamplingParams(max_tokens=5, seed=n, ignore_eos=True)) for n in (1, 4, 9)]
    assert ids == [0, 1, 2]
    assert run(core) == {i: [canned_token(n, n + k) for k in range(5)] for i, n in enumerate((1, 4, 9))}
    assert core.step() == []
    stats = core.stats()
    assert (stats["max_num_running"], stats["num_running"], stats["num_waiting"]) == (3, 0, 0)
    assert (stats["num_steps"], stats["num_tokens_generated"], stats["num_tokens_computed"]) == (5, 15, 1 + 4 + 9 + 3 * 4)
    assert stats["num_finished"] == {"length": 3}
    assert stats["blocks"] == {"total": 16, "free": 16, "cached": 0, "used": 0, "shared": 0, "max_used": 2 + 2 + 4}


def test_a_refused_request_changes_nothing() -> None:
    core = make_core()
    with pytest.raises(InvalidRequestError):
        core.add_request([], SamplingParams())
    assert not core.has_work and len(core.events) == 0
    assert core.add_request([1], SamplingParams()) == 0


def test_events_tell_the_story_in_order() -> None:
    core = make_core(num_blocks=8)
    core.add_request([1] * 15, SamplingParams(max_tokens=6, seed=0, ignore_eos=True))
    core.add_request([1] * 16, SamplingParams(max_tokens=3, seed=1, ignore_eos=True, priority=2))
    run(core)
    story = [(type(event), event.request_id) for event in core.events.recent()]
    assert story == [
        (Arrived, 0), (Arrived, 1), (Admitted, 0), (Admitted, 1), (FirstToken, 0), (FirstToken, 1),
        (Preempted, 1), (Preempted, 1), (Finished, 0), (Admitted, 1), (Finished, 1),
    ]  # fmt: skip
    times = [event.time for event in core.events.recent()]
    assert times == sorted(times)
    again = core.events.recent()[-2]
    assert isinstance(again, Admitted) and (again.resumed, again.num_computed, again.num_blocks) == (True, 12, 5)
    last = core.events.recent()[-1]
    assert isinstance(last, Finished) and last.reason is FinishReason.LENGTH and last.metrics.num_preemptions == 1
    stats = core.stats()
    assert (stats["num_preemptions"], stats["num_resumptions"]) == (1, 1)
    assert stats["waste"]["recomputed"] == 4 / stats["num_tokens_computed"]


def test_internal_waste_is_measured_over_the_steps() -> None:
    core = make_core()
    core.add_request([1] * 5, SamplingParams(max_tokens=3, seed=0, ignore_eos=True))
    core.step()
    assert core.stats()["waste"]["internal_now"] == 3 / 8
    run(core)
    waste = core.stats()["waste"]
    assert waste["internal"] == (3 + 2 + 1) / 24
    assert (waste["max_slots_per_request"], waste["internal_now"]) == (3, 0.0)


def test_drafts_are_counted_and_bring_several_tokens_at_once() -> None:
    core = make_core(speculative_tokens=4)
    core.add_request([1, 2], SamplingParams(max_tokens=28, seed=3, ignore_eos=True))
    brought = []
    while core.has_work:
        brought += [len(update.token_ids) for update in core.step()]
        core.check()
    stats = core.stats()
    accepted = stats["speculation"]["accepted"]
    assert sum(brought) == stats["num_tokens_generated"] == 28 and accepted == 28 - len(brought) > 5
    assert stats["num_tokens_computed"] == 2 + (stats["num_steps"] - 1) + stats["speculation"]["drafted"]
    assert stats["speculation"]["acceptance"] == accepted / stats["speculation"]["drafted"]


def test_beams_are_no_accepted_drafts() -> None:
    core = make_core(speculative_tokens=4)
    core.add_request([1, 2], SamplingParams(temperature=0.0, beam_width=2, max_tokens=6))
    run(core)
    assert core.stats()["speculation"] == {"drafted": 0, "accepted": 0, "acceptance": 0.0}


class FailingRunner(LedgerRunner):
    """Raises in chosen steps, before anything is done."""

    def __init__(self, failures: dict[int, BaseException]) -> None:
        super().__init__(16, 4)
        self.failures = failures

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step in self.failures:
            raise self.failures[plan.step]
        return super().execute(plan)


def test_a_failing_runner_ends_the_requests_of_that_step_and_no_others() -> None:
    core = make_core(FailingRunner({1: RuntimeError("a bad step")}), max_num_seqs=2)
    for seed in range(3):
        core.add_request([1, 2], SamplingParams(max_tokens=3, seed=seed, ignore_eos=True))
    core.step()
    failed = core.step()
    assert [(u.request_id, u.finish_reason) for u in failed] == [(0, FinishReason.ERROR), (1, FinishReason.ERROR)]
    error = failed[0].error
    assert isinstance(error, EngineError) and "step 1" in str(error) and "RuntimeError: a bad step" in str(error)
    core.check()
    assert run(core) == {2: [canned_token(2, 2 + k) for k in range(3)]}
    assert core.stats()["num_finished"] == {"error": 2, "length": 1}


def test_an_interrupt_goes_up_and_leaves_the_books_in_order() -> None:
    core = make_core(FailingRunner({0: KeyboardInterrupt()}))
    core.add_request([1, 2], SamplingParams(max_tokens=2))
    with pytest.raises(KeyboardInterrupt):
        core.step()
    core.check()
    assert not core.has_work and core.abort(0) == []
    core.add_request([1, 2], SamplingParams(max_tokens=2, seed=1, ignore_eos=True))
    assert len(run(core)[1]) == 2


def test_abort_and_finish_between_steps() -> None:
    core = make_core()
    for seed in range(2):
        core.add_request([1] * 6, SamplingParams(max_tokens=9, seed=seed, ignore_eos=True))
    core.step()
    [stopped] = core.finish(0, FinishReason.STOP, "the end")
    [aborted] = core.abort(1)
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, "the end")
    assert aborted.finish_reason is FinishReason.ABORT and aborted.metrics is not None
    assert core.abort(1) == core.abort(99) == []
    assert not core.has_work and core.stats()["blocks"]["used"] == 0
    core.check()


def test_subscribers_hear_everything_and_cannot_stop_the_engine() -> None:
    core = make_core()
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise ValueError("not my day")

    core.events.subscribe(broken)
    leave = core.events.subscribe(heard.append)
    core.add_request([1], SamplingParams(max_tokens=1))
    run(core)
    assert [type(event) for event in heard] == [Arrived, Admitted, FirstToken, Finished]
    leave()
    core.add_request([1], SamplingParams(max_tokens=1))
    assert len(heard) == 4


def test_the_log_is_bounded() -> None:
    log = EventLog(capacity=3)
    for number in range(5):
        log.record(FirstToken(0.0, number))
    assert [event.request_id for event in log.recent()] == [2, 3, 4]


def test_no_array_library_is_imported() -> None:
    code = "import sys, octavo.engine.core; print(sorted({'numpy', 'torch', 'ml_dtypes'} & set(sys.modules)))"
    path = [p for p in sys.path if p]
    out = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
