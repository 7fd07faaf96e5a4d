"""How the scheduler treats the beams of one request: rows, blocks, failures, and one preemption for all."""

from __future__ import annotations

from array import array

import pytest

from octavo.errors import EngineError
from octavo.request import FinishReason, split_id
from octavo.scheduler.admission import StepBudget
from octavo.scheduler.step import StepResult
from tests.helpers.simulation import Simulation


def add_beams(sim: Simulation, prompt: int | list[int], width: int, max_tokens: int = 8, **params: object) -> int:
    return sim.add(prompt, max_tokens, temperature=0.0, beam_width=width, n=width, **params)


def num_beams(sim: Simulation, request_id: int) -> int:
    return len(sim.scheduler._queues.searches[request_id].beams)


def test_a_beam_that_goes_on_alone_is_not_forked() -> None:
    """Each step makes as many forks as beams are dropped, after the first one that makes width - 1; blocks follow at once."""
    sim = Simulation(block_size=4)
    request_id = add_beams(sim, 5, 4, max_tokens=9)
    sim.step()
    assert (num_beams(sim, request_id), sim.blocks.sharing.num_forks, sim.blocks.stats().used) == (4, 3, 2)
    while sim.scheduler.has_work:
        before, forks = {b.id for b in sim.scheduler._queues.searches[request_id].beams}, sim.blocks.sharing.num_forks
        sim.step()
        if sim.scheduler.has_work:
            after = {b.id for b in sim.scheduler._queues.searches[request_id].beams}
            assert sim.blocks.sharing.num_forks - forks == len(after - before) == len(before - after)
            assert sim.blocks.request_ids == after
    assert sim.blocks.sharing.num_fork_copies <= sim.blocks.sharing.num_forks
    sim.check_end()


def test_rows_are_kept_for_beams_to_come() -> None:
    sim = Simulation(max_num_seqs=5, max_num_batched_tokens=4)
    single = sim.add(3, 30)
    beams = add_beams(sim, 9, 4)
    late = sim.add(3, 2)
    sim.step()
    sim.step()
    assert [r.id for r in sim.scheduler._queues.running] == [single, beams]
    for _ in range(6):
        sim.step()
        assert late not in {r.id for r in sim.scheduler._queues.running}
    sim.run()
    assert sim.runner.max_rows == 5
    wide = add_beams(sim, 3, 5)
    other = sim.add(2, 4)
    sim.step()
    assert [r.id for r in sim.scheduler._queues.running] == [wide] and [r.id for r in sim.scheduler._queues.waiting] == [other]
    sim.run()


def test_a_group_is_preempted_and_resumed_as_one() -> None:
    sim = Simulation(num_blocks=20, block_size=2, max_model_len=40, max_num_batched_tokens=64)
    first = sim.add(20, 20, seed=1)
    beams = add_beams(sim, 6, 3, max_tokens=11, early_stopping="never", length_penalty=2.0)
    preempted, resumed = [], []
    while sim.scheduler.has_work:
        plan = sim.step()
        assert plan is not None
        preempted += [(p.request_id, p.was_running) for p in plan.preempted]
        resumed += [split_id(a.request_id)[0] for a in plan.admitted if a.resumed]
        if any(p.was_running for p in plan.preempted):
            assert not any(split_id(i)[0] == beams for i in sim.runner.rows)
    sim.check_end()
    assert (beams, True) in preempted and first not in {request_id for request_id, _ in preempted}
    assert resumed.count(beams) == preempted.count((beams, True)) == sim.requests[beams].num_preemptions


def test_stepping_back_loses_nothing_though_the_first_beam_was_dropped() -> None:
    sim = Simulation(block_size=4)
    request_id = add_beams(sim, 6, 3, max_tokens=20, early_stopping="never", length_penalty=2.0)
    sim.step()
    search = sim.scheduler._queues.searches[request_id]
    while request_id in {beam.id for beam in search.beams} or search.beams[0].num_computed < 14:
        sim.step()
    before, num_computed = [beam.num_computed for beam in search.beams], sum(plan.num_tokens for plan in sim.runner.plans)
    sim.scheduler._room.step_back(search.request, 1, StepBudget(64))
    assert [beam.num_computed for beam in search.beams] == before and len(sim.scheduler._queues.running) == 0
    sim.step()
    assert sum(plan.num_tokens for plan in sim.runner.plans) == num_computed + 3
    sim.run()


def test_aborting_ends_all_beams_and_one_output_cannot_be_aborted() -> None:
    sim = Simulation()
    beams, other = add_beams(sim, 7, 3), sim.add(4, 6)
    for _ in range(3):
        sim.step()
    assert sim.scheduler.abort(beams, sample_index=1, now=0.0) == []
    sim.abort(beams)
    assert sim.blocks.request_ids == {other}
    sim.run()


def test_a_failed_step_ends_a_search_once() -> None:
    sim = Simulation()
    beams, other = add_beams(sim, 7, 3), sim.add(4, 6)
    sim.step()
    plan = sim.scheduler.schedule(1.0)
    assert plan is not None
    updates = sim.scheduler.fail(plan, EngineError("broken"), 1.0)
    assert sorted((u.request_id, u.sample_index) for u in updates) == [(beams, 0), (beams, 1), (beams, 2), (other, 0)]
    assert not sim.scheduler.has_work and not sim.blocks.request_ids
    sim.scheduler.check()


def test_logits_that_are_not_numbers_end_the_search_with_an_error() -> None:
    sim = Simulation()
    add_beams(sim, 7, 3)
    plan = sim.scheduler.schedule(0.0)
    assert plan is not None
    updates = sim.scheduler.commit(plan, StepResult(array("i", [-1])), 0.0)
    assert {u.finish_reason for u in updates} == {FinishReason.ERROR} and len(updates) == 3
    assert "not numbers" in str(updates[0].error)
    assert not sim.scheduler.has_work and not sim.blocks.request_ids


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_budget_smaller_than_the_beams_splits_a_step_of_the_search(budget: int) -> None:
    sim = Simulation(max_num_batched_tokens=budget)
    add_beams(sim, 5, 4, max_tokens=6, length_penalty=0.0)
    sim.run()
    assert sim.runner.max_rows == 4 and max(plan.num_requests for plan in sim.runner.plans) <= budget
