"""Which drafts are made, how many, and what becomes of them: adaptivity, room, blocks, ends in the middle."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import SchedulerConfig
from octavo.errors import ConfigError
from octavo.limits import RequestLimits, make_request
from octavo.request import FinishReason, Request, SamplingParams
from octavo.scheduler.speculation import FREE_ROWS, MAX_INDEXED, MAX_REQUESTS, Drafter, Speculator, StepCosts
from octavo.scheduler.step import StepPlan
from tests.helpers.ledger_runner import VOCAB, canned_token
from tests.helpers.simulation import Simulation

LIMITS = RequestLimits(VOCAB, 100_000, 100_000)
REPEATS = 3
"""A seed whose tokens come again after five."""


def request_of(tokens: list[int], output: int = 1, request_id: int = 0, max_tokens: int = 100, **params: object) -> Request:
    """A request that has got as far as ``output`` tokens."""
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    request = make_request(request_id, tokens[: len(tokens) - output], sampling, LIMITS, 0.0)
    request.token_ids.extend(tokens[len(tokens) - output :])
    return request


def speculator_of(tokens: int = 8, **config: int) -> Speculator:
    speculator = Speculator(SchedulerConfig(speculative_tokens=tokens, **config))  # type: ignore[arg-type]
    speculator.begin_step(1)
    return speculator


def draft(speculator: Speculator, request: Request) -> list[int]:
    """As if it were alone in a step."""
    speculator.begin_step(1)
    return speculator.drafts(request, 100).tolist()


# ---------------------------------------------------------------- how many


def test_a_repetition_is_taken_to_go_on() -> None:
    drafter, tokens = Drafter(2, 8), array("i", [5, 1, 2, 3, 1, 2, 3])
    drafter.catch_up(tokens, 100)
    assert drafter.guess(tokens, 8).tolist() == [1, 2, 3, 1, 2, 3, 1, 2]


def test_drafts_grow_while_they_are_right_and_stop_when_they_fail() -> None:
    speculator = speculator_of()
    request = request_of([1, 2, 3, 4] * 3, max_tokens=1000)
    counts = []
    for _ in range(20):
        counts.append(len(draft(speculator, request)))
        for _ in range(1 + counts[-1]):  # all are accepted
            request.token_ids.append(request.token_ids[-4])
    assert counts == sorted(counts) and 1 <= counts[0] <= 2 and counts[-1] == 8

    counts = []
    for fresh in range(100, 160):
        request.token_ids.extend([fresh, 1, 2])  # "1 2" again, and each time another token behind it
        counts.append(len(draft(speculator, request)))
    assert counts[0] == 8 and counts[-10:] == [0] * 10 and sum(counts) < 60

    while not draft(speculator, request):  # right guesses are counted while none is drafted
        request.token_ids.append(5)
        assert request.num_output < 600


def test_what_was_guessed_but_not_drafted_counts_as_if_it_had_been() -> None:
    drafter, tokens = Drafter(2, 8), array("i", [1, 2, 3, 4, 1, 2])
    for token, sign in ((3, 1), (4, 1), (9, -1)):
        drafter.catch_up(tokens, 100)
        before = drafter.acceptance
        assert len(drafter.guess(tokens, 8)) == 8
        tokens.append(token)
        drafter.catch_up(tokens, 100)
        assert (drafter.acceptance - before) * sign > 0


def test_more_requests_in_a_step_ask_for_a_higher_acceptance() -> None:
    drafter = Drafter(2, 8)
    drafter.acceptance = 0.8
    assert [drafter.num_worthwhile(StepCosts().least_acceptance(n), 8) for n in (1, 2, 4, 6, 7, 64)] == [8, 5, 2, 0, 0, 0]
    speculator = speculator_of()
    assert speculator.begin_step(FREE_ROWS - 2) and not speculator.begin_step(FREE_ROWS)
    assert not Speculator(SchedulerConfig()).begin_step(1)


def plan_of(num_requests: int, num_rows: int, num_drafts: int = 0) -> StepPlan:
    """A step with so many rows in all, of which the first request's last ones are drafts."""
    sizes = array("i", [num_rows - num_requests + 1] + [1] * (num_requests - 1))
    zeros = array("i", [0]) * num_requests
    drafts = array("i", [num_drafts] + [0] * (num_requests - 1)) if num_drafts else array("i")
    tokens, none = array("i", [0]) * num_rows, array("i")
    ids = array("q", range(num_requests))
    return StepPlan(0, (), (), ids, zeros, sizes, tokens, zeros, none, zeros, none, none, none, num_drafts=drafts)


def test_what_rows_and_steps_cost_is_measured() -> None:
    """A machine whose steps take the longer of reading the weights, 10 ms, and of the arithmetic of its rows."""
    for row_ms, free_rows in ((1.0, 10), (0.25, 40)):
        speculator = speculator_of()

        def run(plan: StepPlan, row_ms: float = row_ms, speculator: Speculator = speculator) -> None:
            speculator.observe(plan, max(10.0, row_ms * plan.num_tokens) / 1000)

        run(plan_of(1, 300))
        run(plan_of(1, 1))
        assert speculator.begin_step(free_rows // 2) and not speculator.begin_step(free_rows)
        for _ in range(9):
            run(plan_of(3, 7, num_drafts=4))
        assert speculator.begin_step(free_rows // 2) and not speculator.begin_step(free_rows)
        for _ in range(9):  # bound by arithmetic: a draft cannot pay
            run(plan_of(60, 60))
        assert not speculator.begin_step(60)
    speculator.observe(plan_of(1, 1), 0.0)
    assert not speculator_of().begin_step(MAX_REQUESTS + 1)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 9), st.integers(0, 12), st.integers(1, 12))
def test_drafts_are_few_enough_and_followed_the_last_tokens_before(tokens: list[int], most: int, room: int, left: int) -> None:
    request = request_of(tokens, max_tokens=left)
    speculator = speculator_of(most)
    drafts = speculator.drafts(request, room).tolist()
    assert len(drafts) <= min(most, room, left - 2 if left > 1 else 0)
    for start in range(2, len(tokens)) if drafts else ():
        repeated = (tokens[start:] * 10)[: len(drafts)]
        if repeated == drafts and tokens[start - 2 : start] == tokens[-2:]:
            break
    else:
        assert not drafts


def test_beams_and_grammars_get_none() -> None:
    class Grammar:
        def start(self) -> None: ...

    tokens = [1, 2, 3] * 4
    assert speculator_of().drafts(request_of(tokens), 9)
    assert not speculator_of().drafts(request_of(tokens, beam_width=2, temperature=0.0), 9)
    assert not speculator_of().drafts(request_of(tokens, constraint=Grammar()), 9)


def test_a_step_takes_in_long_prompts_one_after_another() -> None:
    speculator = speculator_of()
    tokens = [1, 2, 3, 4] * (MAX_INDEXED // 4 - 1)
    one, other = request_of(tokens, request_id=1), request_of(tokens, request_id=2)
    assert speculator.drafts(one, 8) and not speculator.drafts(other, 8)
    speculator.begin_step(1)
    assert speculator.drafts(one, 8) and speculator.drafts(other, 8)
    speculator.forget(1)
    speculator.forget(3)
    assert len(speculator) == 1


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculative_tokens must be from 0 \(off\) to 64, not -1"):
        SchedulerConfig(speculative_tokens=-1)
    for wrong in ({"speculative_ngram_min": 0}, {"speculative_ngram_min": 9}, {"speculative_ngram_max": 65}):
        with pytest.raises(ConfigError, match="speculative_ngram_min <= speculative_ngram_max <= 64 must hold"):
            SchedulerConfig(**wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------- in a step


def run_to_draft(sim: Simulation) -> StepPlan:
    """Up to the first step with drafts, which has been executed and committed."""
    while True:
        plan = sim.step()
        assert plan is not None
        if plan.num_drafts:
            return plan


def test_a_request_that_repeats_itself_takes_fewer_steps_for_the_same_tokens() -> None:
    steps = []
    for speculative_tokens in (0, 1, 8):
        sim = Simulation(speculative_tokens=speculative_tokens)
        sim.add(3, 40, seed=REPEATS)
        sim.run()
        steps.append(sim.steps)
        assert len(sim.scheduler._speculator) == 0
    assert steps[0] == 40 and steps[1] < 30 and steps[2] < 25


def test_drafts_take_the_tokens_that_a_step_has_left() -> None:
    sim = Simulation(speculative_tokens=8, any_drafts=True, max_num_batched_tokens=6, max_model_len=128)
    sim.add(2, 60, seed=REPEATS)
    sim.step()
    sim.add(50, 5, seed=1)
    while sim.outputs[1] == []:
        plan = sim.step()
        assert plan is not None and not plan.num_drafts, "drafts made a prompt wait"
    sim.run()


def test_drafts_take_no_block_that_another_could_have_had() -> None:
    """Two requests fill a pool to the last block; with drafts nobody is preempted who would not be without."""
    preemptions = []
    for speculative_tokens in (0, 8):
        sim = Simulation(num_blocks=8, block_size=4, max_model_len=32, speculative_tokens=speculative_tokens, any_drafts=True)
        for seed in (3, 7):
            sim.add(4, 12, seed=seed)
        sim.run()
        preemptions.append(sum(request.num_preemptions for request in sim.requests.values()))
    assert preemptions == [0, 0]


def test_blocks_of_rejected_drafts_are_given_up_and_cannot_be_found() -> None:
    sim = Simulation(block_size=2, prefix_caching=True, speculative_tokens=8, max_model_len=64)
    sim.add([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3], 20, seed=0)
    sim.step()
    request = sim.requests[0]
    request.token_ids[-1] = 4  # so that the prompt seems to go on: drafts 5, 6, 1 ..., none of which is sampled
    sim.runner.rows[0].tokens[-1] = 4
    plan = sim.scheduler.schedule(0.0)
    assert plan is not None and plan.num_drafts[0] >= 1 and plan.sampled[0] == plan.num_drafts[0] + 1
    drafts = plan.token_ids[-plan.num_drafts[0] :]
    assert drafts[0] == 5 and sim.blocks.num_tokens(0) == request.num_known + len(drafts)
    sim.blocks.check()
    wrong = array("i", [*request.token_ids, *drafts, 1, 1])
    sim.blocks.admit(99, wrong, None, True, True)
    assert sim.blocks.num_tokens(99) <= request.num_known, "a rejected draft was found"
    sim.blocks.release(99)
    sim.scheduler.commit(plan, sim.runner.execute(plan), 0.0)
    sim.scheduler.check()
    assert request.num_computed == request.num_known - 1 == sim.blocks.num_tokens(0)
    assert sim.blocks.num_held(0) == -(-request.num_computed // 2)


def test_what_accepted_drafts_filled_can_be_found() -> None:
    sim = Simulation(block_size=2, prefix_caching=True, speculative_tokens=8, any_drafts=True)
    sim.add(4, 30, seed=REPEATS)
    sim.run()
    request = sim.requests[0]
    sim.add(request.token_ids.tolist(), 2, seed=REPEATS)
    sim.run()
    assert sim.requests[1].num_cached_tokens >= request.num_known - 2


@pytest.mark.parametrize("stop_after", range(1, 12))
def test_a_stop_token_among_accepted_drafts_ends_the_request_there(stop_after: int) -> None:
    """Tokens 0, 1 ... 4, 0, 1 ...: the stop token is the one after min_tokens."""
    for min_tokens in (0, 6):
        sim = Simulation(speculative_tokens=9, any_drafts=True)
        stop = canned_token(REPEATS, 3 + stop_after - 1)
        sim.add(3, 30, seed=REPEATS, stop_token_ids=[stop], min_tokens=min_tokens)
        sim.run()  # compares with what the request gets alone
        ending = sim.endings[0]
        assert (ending.finish_reason, ending.stop_reason) == (FinishReason.STOP, stop)


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_and_the_end_of_the_context_cut_drafts(max_tokens: int) -> None:
    sim = Simulation(speculative_tokens=9, any_drafts=True, max_model_len=3 + max_tokens, num_blocks=16)
    sim.add(3, max_tokens, seed=REPEATS)
    sim.add(3, None, seed=REPEATS + 4)
    sim.run()
    assert [len(output) for output in sim.outputs.values()] == [max_tokens, max_tokens]


def test_an_abort_while_drafts_are_computed_leaves_nothing() -> None:
    sim = Simulation(speculative_tokens=9, prefix_caching=True)
    sim.add(10, 40, seed=REPEATS)
    run_to_draft(sim)
    sim.step(abort_before_commit=0)
    assert not sim.scheduler.has_work and not sim.blocks.request_ids
    assert len(sim.scheduler._speculator) == 0


def test_samples_draft_for_themselves_after_their_fork() -> None:
    for fork_mode in ("copy_on_write", "recompute"):
        sim = Simulation(speculative_tokens=4, any_drafts=True, fork_mode=fork_mode, prefix_caching=True)
        sim.add(7, 30, seed=REPEATS, n=3)
        sim.run()
        assert any(sum(count > 0 for count in plan.num_drafts) > 1 for plan in sim.runner.plans)
        assert all(
            not drafts or sampled == drafts + 1 for p in sim.runner.plans for drafts, sampled in zip(p.num_drafts, p.sampled, strict=False)
        )
