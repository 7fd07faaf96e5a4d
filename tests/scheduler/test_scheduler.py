"""Exact expectations: what is scheduled, who is preempted, what it gives up, who is admitted when."""

from __future__ import annotations

import pytest

from octavo.blocks import BlockManager
from octavo.config import SchedulerConfig
from octavo.errors import EngineError, MemoryConfigError
from octavo.request import FinishReason
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step import Preemption, StepPlan
from tests.helpers.simulation import Simulation


def scheduled(plan: StepPlan | None) -> dict[int, int]:
    """Tokens scheduled per request."""
    assert plan is not None
    return dict(zip(plan.request_ids, plan.num_scheduled, strict=True))


def admitted(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [admission.request_id for admission in plan.admitted]


def test_a_pool_that_cannot_hold_one_request_is_refused_with_the_fix() -> None:
    with pytest.raises(MemoryConfigError, match="lower max_model_len to 64, or raise num_blocks to 5"):
        Scheduler(SchedulerConfig(), 65, BlockManager(4, 16))


def test_one_request_from_prompt_to_end() -> None:
    sim = Simulation()
    sim.add(5, 3)
    first = sim.step()
    assert first is not None
    assert (admitted(first), first.num_computed.tolist(), first.num_scheduled.tolist(), first.sampled.tolist()) == ([0], [0], [5], [1])
    assert (first.num_new_blocks.tolist(), first.new_block_ids.tolist()) == ([0], [])
    assert first.admitted[0].block_ids.tolist() == [0, 1]
    second, third = sim.step(), sim.step()
    assert second is not None and third is not None
    assert (second.num_computed.tolist(), second.token_ids.tolist()) == ([5], sim.outputs[0][:1])
    assert sim.endings[0].finish_reason is FinishReason.LENGTH
    assert sim.step() is None
    # The last token is never computed: 5 + 3 known, 7 computed.
    assert third.num_computed[0] + 1 == 7
    sim.add(1)
    plan = sim.step()
    assert plan is not None and plan.released == (0,)


def test_a_long_prompt_goes_in_chunks_mixed_with_output() -> None:
    sim = Simulation(max_num_batched_tokens=10)
    sim.add(4)
    sim.add(25)
    assert scheduled(sim.step()) == {0: 4, 1: 6}
    plan = sim.step()
    assert scheduled(plan) == {0: 1, 1: 9}
    assert plan is not None and plan.sampled.tolist() == [1, 0]
    assert [scheduled(sim.step()) for _ in range(2)] == [{0: 1, 1: 9}, {0: 1, 1: 1}]


def test_a_long_prompt_ahead_leaves_a_token_for_those_behind() -> None:
    sim = Simulation(max_num_batched_tokens=10, policy="priority")
    sim.add(3)
    sim.add(3)
    sim.step()
    sim.add(30, priority=-1)
    assert scheduled(sim.step()) == {0: 1, 1: 1, 2: 8}
    assert scheduled(sim.step()) == {2: 8, 0: 1, 1: 1}


def test_more_requests_than_budget_all_finish() -> None:
    sim = Simulation(max_num_batched_tokens=1)
    for _ in range(5):
        sim.add(3, 4)
    sim.run()


def test_max_num_seqs_bounds_the_running() -> None:
    sim = Simulation(max_num_seqs=2)
    for _ in range(3):
        sim.add(2, 2)
    assert admitted(sim.step()) == [0, 1]
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting) == (2, 1)
    sim.step()
    assert admitted(sim.step()) == [2]


def test_priority_orders_the_waiting_and_arrival_breaks_ties() -> None:
    sim = Simulation(max_num_seqs=1, policy="priority")
    for priority in (1, 0, 0, -1):
        sim.add(1, 1, priority=priority)
    assert [admitted(sim.step()) for _ in range(4)] == [[3], [1], [2], [0]]


def test_fcfs_ignores_priority() -> None:
    sim = Simulation(max_num_seqs=1)
    for priority in (1, 0):
        sim.add(1, 1, priority=priority)
    assert [admitted(sim.step()) for _ in range(2)] == [[0], [1]]


def test_the_newest_gives_up_only_the_tail_that_is_needed() -> None:
    sim = Simulation(num_blocks=8, block_size=4, max_model_len=32)
    sim.add(12, 20)  # 3 blocks
    sim.add(4, 20)  # 1 block
    sim.add(15, 10)  # 4 blocks
    sim.step()  # now all 8 blocks are used
    plan = sim.step()
    # Request 0 needs a 4th block for position 12 and takes the last one of request 2; request 1 takes the next.
    assert plan is not None
    assert plan.preempted == (
        Preemption(2, by=0, num_needed=1, num_given=1, num_lost=3, was_running=True),
        Preemption(2, by=1, num_needed=1, num_given=1, num_lost=4, was_running=False),
    )
    assert (plan.released, scheduled(plan)) == ((2,), {0: 1, 1: 1})
    assert (sim.blocks.num_held(2), sim.requests[2].num_computed, sim.requests[2].num_preemptions) == (2, 8, 1)
    sim.run()


def test_the_victim_is_of_the_lowest_priority_not_the_newest_of_all() -> None:
    sim = Simulation(num_blocks=6, block_size=4, max_model_len=24, policy="priority")
    sim.add(8, 9, priority=5)
    sim.add(8, 9, priority=0)
    sim.add(8, 9, priority=1)
    sim.step()
    plan = sim.step()
    assert plan is not None
    assert [(p.request_id, p.by) for p in plan.preempted] == [(0, 1), (0, 2)]
    sim.run()


def test_a_victim_whose_blocks_are_all_shared_is_passed_by() -> None:
    sim = Simulation(num_blocks=6, block_size=4, max_model_len=24)
    for _ in range(3):
        sim.add(8, 9)
    sim.step()
    for block in sim.blocks.block_ids(2):
        sim.blocks.pool.share(block)
    plan = sim.scheduler.schedule(0.0)
    assert plan is not None
    assert (plan.preempted[0].request_id, plan.preempted[0].num_given) == (1, 1)


def test_heads_of_preempted_requests_go_before_any_running_one() -> None:
    sim = Simulation(num_blocks=8, block_size=2, max_model_len=16)
    sim.add(6, 9)  # 3 blocks
    sim.add(2, 9)  # 1 block
    sim.add(8, 7)  # 4 blocks
    sim.step()
    lost = [(p.request_id, p.was_running, p.num_given) for _ in range(5) for p in sim.step().preempted]  # type: ignore[union-attr]
    # Requests 0 and 1 take a block each at every other step; all four of request 2 go first.
    assert lost == [(2, True, 1), (2, False, 1), (2, False, 1), (2, False, 1), (1, True, 1)]
    sim.run()


def test_nothing_new_is_admitted_after_a_preemption() -> None:
    sim = Simulation(num_blocks=8, block_size=4, max_model_len=32)
    sim.add(15, 12)  # 4 blocks, the 5th in step 3
    sim.add(4, 3)  # 1 block, the 2nd in step 2, both free after step 3
    sim.add(12, 9)  # 3 blocks
    sim.step()
    sim.add(1, 1)
    plans = [sim.step(), sim.step()]
    assert [[(p.request_id, p.by, p.num_given) for p in plan.preempted] for plan in plans if plan] == [[(2, 1, 1)], [(2, 0, 1)]]
    # Request 2 needs 3 more blocks and 2 are free: request 3 would fit, but must not pass it.
    assert (sim.blocks.num_free, list(sim.endings)) == (2, [1])
    while 0 not in sim.endings:
        assert admitted(sim.step()) == []
    assert admitted(sim.step()) == [2, 3]
    sim.run()


def test_a_better_rank_may_pass_preempted_requests_once_a_request_has_ended() -> None:
    sim = Simulation(num_blocks=8, block_size=4, max_model_len=32, policy="priority")
    sim.add(15, 12)
    sim.add(4, 3)
    sim.add(12, 9, priority=1)
    sim.step()
    urgent = sim.add(1, 1, priority=-1)
    assert [admitted(sim.step()) for _ in range(3)] == [[], [], [urgent]]
    sim.run()


def test_a_request_with_nobody_behind_steps_back_with_its_blocks() -> None:
    sim = Simulation(num_blocks=8, block_size=4, max_model_len=32)
    sim.add(15, 12)
    sim.add(16, 9)
    sim.step()
    plan = sim.step()
    assert plan is not None
    assert plan.preempted == (Preemption(1, by=1, num_needed=1, num_given=0, num_lost=0, was_running=True),)
    assert sim.blocks.num_held(1) == 4
    sim.run()


def test_a_resumed_request_brings_its_whole_table_and_all_tokens() -> None:
    sim = Simulation(num_blocks=8, block_size=4, max_model_len=32)
    sim.add(15, 6)
    sim.add(16, 9)
    while 0 not in sim.endings:
        sim.step()
    plan = sim.step()
    assert plan is not None and plan.released == (0,)
    (again,) = plan.admitted
    assert again.token_ids.tolist() == [31 + p for p in range(16)] + sim.outputs[1][:1]
    assert (len(again.block_ids), plan.num_computed.tolist(), scheduled(plan)) == (5, [12], {1: 5})
    sim.run()


def test_a_request_that_does_not_fit_is_passed_over_so_often_and_no_more() -> None:
    sim = Simulation(num_blocks=8, block_size=4, max_model_len=32, max_passed_over=2)
    sim.add(16, 16)
    sim.step()
    sim.add(24, 2)
    for _ in range(4):
        sim.add(1, 1)
    assert admitted(sim.step()) == [2, 3]
    assert sim.requests[1].num_passed_over == 2
    while 0 not in sim.endings:
        assert admitted(sim.step()) == []
    assert admitted(sim.step()) == [1, 4, 5]


def test_stop_tokens_count_from_min_tokens_on() -> None:
    probe = Simulation()
    probe.add(3, 6, seed=3)
    probe.run()
    first, _, third = probe.outputs[0][:3]
    sim = Simulation()
    own = sim.add(3, 6, seed=3, stop_token_ids=[first, third], min_tokens=2)
    model = sim.add(3, 6, seed=3)
    sim.requests[model].stop_ids = frozenset({third})
    sim.run()
    assert sim.outputs[own] == sim.outputs[model] == probe.outputs[0][:3]
    assert (sim.endings[own].finish_reason, sim.endings[own].stop_reason) == (FinishReason.STOP, third)
    assert (sim.endings[model].finish_reason, sim.endings[model].stop_reason) == (FinishReason.STOP, None)


def test_the_rest_of_the_context_ends_at_max_model_len() -> None:
    sim = Simulation(max_model_len=20)
    sim.add(5, None)
    sim.run()
    assert len(sim.outputs[0]) == 15


@pytest.mark.parametrize("when", ["waiting", "chunked", "between", "preempted"])
def test_aborts_at_any_moment_leave_nothing(when: str) -> None:
    sim = Simulation(num_blocks=8, block_size=4, max_model_len=32, max_num_batched_tokens=20)
    sim.add(15, 12)
    sim.add(16, 9)
    if when == "waiting":
        sim.abort(1)
    elif when == "chunked":
        sim.step()
        assert 0 < sim.requests[1].num_computed < 16
        sim.abort(1)
    elif when == "between":
        sim.step(abort_before_commit=1)
    else:
        while not sim.requests[1].num_preemptions:
            sim.step()
        sim.abort(1)
    sim.scheduler.check()
    assert sim.endings[1].finish_reason is FinishReason.ABORT
    assert sim.scheduler.abort(1, now=0.0) == []
    sim.run()
    assert len(sim.outputs[0]) == 12


def test_a_failed_step_ends_its_requests_and_releases_their_rows() -> None:
    sim = Simulation(max_num_seqs=1)
    for _ in range(3):
        sim.add(3)
    plan = sim.scheduler.schedule(0.0)
    assert plan is not None
    error = EngineError("out of luck")
    (update,) = sim.scheduler.fail(plan, error, 1.0)
    assert (update.request_id, update.finish_reason, update.error) == (0, FinishReason.ERROR, error)
    sim.scheduler.check()
    second = sim.scheduler.schedule(2.0)
    assert second is not None and (second.released, list(second.request_ids)) == ((0,), [1])
    # The runner may have raised before it dropped the rows of the first step, so they are named again.
    sim.scheduler.fail(second, error, 3.0)
    third = sim.scheduler.schedule(4.0)
    assert third is not None and (third.released, list(third.request_ids)) == ((0, 1), [2])


def test_times_are_those_of_the_clock() -> None:
    sim = Simulation(max_num_seqs=1)
    sim.add(2, 2)
    sim.add(2, 1)
    sim.run()
    metrics = sim.endings[1].metrics
    assert metrics is not None
    assert (metrics.arrival_time, metrics.admitted_time, metrics.first_token_time, metrics.finish_time) == (0.0, 2.0, 3.0, 3.0)
