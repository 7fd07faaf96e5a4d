"""Exact expectations: samples that fork, shared prompts, what is computed once, what an abort or a failure leaves."""

from __future__ import annotations

from array import array

import pytest

from octavo.errors import EngineError, InvalidRequestError
from octavo.request import MAX_BEST_OF, FinishReason, SamplingParams, fork_id, split_id
from octavo.scheduler.step import StepPlan
from tests.helpers.ledger_runner import canned_token
from tests.helpers.simulation import Simulation


def computed(sim: Simulation) -> int:
    """Tokens that went through the model."""
    return sum(plan.num_tokens for plan in sim.runner.plans)


def starts(plan: StepPlan | None) -> dict[tuple[int, int], int]:
    """First scheduled position by (request, sample)."""
    assert plan is not None
    return {split_id(i): start for i, start in zip(plan.request_ids, plan.num_computed, strict=True)}


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize(("prompt_len", "copies"), [(10, 3), (8, 0)])
def test_samples_compute_the_prompt_once_and_copy_one_block_each_but_the_last(prompt_len: int, copies: int) -> None:
    sim = Simulation(block_size=4)
    sim.add(prompt_len, 6, n=4, seed=5)
    first = sim.step()
    assert first is not None and first.sampled.tolist() == [4]
    assert sim.blocks.stats().saved == 3 * -(-prompt_len // 4)
    second = sim.step()
    assert starts(second) == {(0, index): prompt_len for index in range(4)}
    assert second is not None and len(second.copy_sources) == copies
    assert second.replaced.tolist() == [copies > 0, 0, 0, 0], "the first one has a row already; the others bring whole tables"
    sim.run()
    assert computed(sim) == prompt_len + 4 * 5
    assert (sim.blocks.sharing.num_forks, sim.blocks.sharing.num_fork_copies, sim.runner.num_copies) == (3, copies, copies)
    assert [sim.outputs[fork_id(0, i)][0] for i in range(4)] == [canned_token(5, prompt_len, i) for i in range(4)]


def test_a_sample_is_the_same_whatever_n_is() -> None:
    outputs = []
    for n in (2, 5):
        sim = Simulation()
        sim.add(7, 6, n=n, seed=11)
        sim.run()
        outputs.append([sim.outputs[fork_id(0, index)] for index in range(2)])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("fork_mode", ["copy_on_write", "recompute"])
@pytest.mark.parametrize("caching", [True, False])
def test_both_designs_give_the_same_and_recompute_finds_full_blocks_in_the_cache(fork_mode: str, caching: bool) -> None:
    sim = Simulation(fork_mode=fork_mode, prefix_caching=caching, num_blocks=256, max_num_batched_tokens=512)
    sim.add(22, 4, n=6, seed=1)
    sim.run()
    assert [sim.outputs[fork_id(0, i)][0] for i in range(6)] == [canned_token(1, 22, i) for i in range(6)]
    once = 22 if fork_mode == "copy_on_write" else 22 + 5 * (2 if caching else 22)
    assert computed(sim) == once + 6 * 3
    assert sim.blocks.sharing.num_forks == (5 if fork_mode == "copy_on_write" else 0)


def test_more_samples_than_rows_wait_for_their_turn_with_their_shared_blocks() -> None:
    sim = Simulation(max_num_seqs=3, num_blocks=40)
    sim.add(9, 5, n=8, seed=2)
    sim.add(3, 2)
    sim.step()
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting) == (2, 7)
    assert sim.blocks.num_held(fork_id(0, 7)) == 3
    sim.run()
    assert computed(sim) == 9 + 8 * 4 + 3 + 1, "nobody had to give anything up"
    assert sim.runner.max_rows == 3


def test_samples_that_hold_all_blocks_give_them_up_to_the_first() -> None:
    sim = Simulation(num_blocks=6, block_size=4, max_model_len=24, max_num_seqs=8)
    sim.add(14, 10, n=5, seed=3)
    sim.run()
    assert sum(p.num_given for plan in sim.runner.plans for p in plan.preempted) > 0
    assert len(sim.endings) == 5 and sim.blocks.num_free == 6


def test_a_step_draws_no_more_samples_than_the_sampler_holds() -> None:
    sim = Simulation(num_blocks=2000, max_num_batched_tokens=8, max_num_seqs=1000)
    for _ in range(3):
        sim.add(2, 2, n=100)
    plans = [sim.step() for _ in range(2)]
    assert plans[0] is not None and plans[0].sampled.tolist() == [100]
    assert all(sum(plan.sampled) - len(plan.sampled) < MAX_BEST_OF for plan in plans if plan)
    sim.run()


def test_a_sample_that_ends_with_its_first_token_takes_nothing() -> None:
    sim = Simulation()
    sim.add(6, 8, n=3, seed=4, stop_token_ids=[canned_token(4, 6, 0), canned_token(4, 6, 2)])
    sim.step()
    assert set(sim.endings) == {fork_id(0, 0), fork_id(0, 2)}
    assert starts(sim.step()) == {(0, 1): 6}
    assert sim.blocks.sharing.num_fork_copies == 0
    sim.run()


@pytest.mark.parametrize("fork_mode", ["copy_on_write", "recompute"])
@pytest.mark.parametrize("when", ["before", "prefill", "between", "after"])
def test_one_sample_can_be_given_up_at_any_moment(fork_mode: str, when: str) -> None:
    for index in (0, 2):
        sim = Simulation(max_num_batched_tokens=8, fork_mode=fork_mode)
        sim.add(12, 6, n=3, seed=6)
        if when == "before":
            sim.abort(0, index)
        elif when == "prefill":
            sim.step()
            sim.abort(0, index)
        elif when == "between":
            sim.step()
            sim.step(abort_before_commit=0, sample_index=index)
        else:
            for _ in range(3):
                sim.step()
            sim.abort(0, index)
        sim.scheduler.check()
        assert sim.scheduler.abort(0, sample_index=index, now=0.0) == []
        sim.run()
        assert {split_id(i)[1]: ending.finish_reason is FinishReason.ABORT for i, ending in sim.endings.items()} == {
            i: i == index for i in range(3)
        }


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_all_samples_can_be_given_up_at_any_moment(steps: int) -> None:
    sim = Simulation(max_num_batched_tokens=8)
    sim.add(12, 6, n=3)
    for _ in range(steps):
        sim.step()
    sim.abort(0)
    sim.scheduler.check()
    assert len(sim.endings) == 3 and not sim.scheduler.has_work and sim.blocks.num_free == sim.num_blocks


def test_a_failed_step_ends_the_samples_in_it_and_no_others() -> None:
    sim = Simulation(max_num_seqs=2)
    sim.add(5, 6, n=4)
    sim.step()
    plan = sim.scheduler.schedule(0.0)
    assert plan is not None and len(plan.request_ids) == 2
    updates = sim.scheduler.fail(plan, EngineError("no"), 1.0)
    assert [(u.request_id, u.sample_index, u.finish_reason) for u in updates] == [(0, 0, FinishReason.ERROR), (0, 1, FinishReason.ERROR)]
    sim.scheduler.check()
    for update in updates:
        sim._end(update)
    while sim.scheduler.has_work:
        sim.step()
    assert [len(sim.outputs[fork_id(0, i)]) for i in range(4)] == [1, 1, 6, 6]


def test_a_failed_prefill_ends_all_samples() -> None:
    sim = Simulation()
    sim.add(5, 6, n=4)
    plan = sim.scheduler.schedule(0.0)
    assert plan is not None
    assert [u.sample_index for u in sim.scheduler.fail(plan, EngineError("no"), 1.0)] == [0, 1, 2, 3]
    assert not sim.scheduler.has_work
    sim.scheduler.check()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 0}, "n must be at least 1, not 0"),
        ({"n": 129}, "n must be at most 128, not 129"),
        ({"n": 3, "best_of": 2}, r"best_of must be from n \(3\) to 128, or None for n, not 2"),
        ({"best_of": 500}, r"best_of must be from n \(1\) to 128"),
        ({"cache_salt": 7}, "cache_salt must be text or None, not 7"),
    ],
)
def test_what_is_refused(params: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**params)  # type: ignore[arg-type]


# ---------------------------------------------------------------- shared prompts

PREFIX = list(range(512))


def test_64_requests_with_the_same_new_prefix_compute_it_once() -> None:
    sim = Simulation(num_blocks=2000, block_size=16, max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=600, prefix_caching=True)
    for number in range(64):
        sim.add([*PREFIX, 900 + number, 7], 3)
    sim.step()
    sim.step()
    assert (sim.scheduler.num_running, sim.blocks.stats().used, sim.blocks.stats().shared) == (64, 32 + 64, 32)
    sim.run()
    assert computed(sim) == 512 + 64 * 2 + 64 * 2
    counts = sim.blocks.sharing
    assert (counts.num_queries, counts.num_hits, counts.num_tokens_saved, counts.num_blocks_shared) == (64, 63, 63 * 512, 63 * 32)


@pytest.mark.parametrize("budget", [16, 100])
def test_a_request_waits_for_a_prefix_that_another_one_computes_in_chunks(budget: int) -> None:
    sim = Simulation(num_blocks=200, block_size=16, max_model_len=1024, max_num_batched_tokens=budget, prefix_caching=True)
    for number in range(3):
        sim.add([*PREFIX[:330], 900 + number], 2)
    sim.run()
    # 330 = 20 blocks and 10 tokens; these are copied by those who come once they are computed, and computed by others.
    assert 331 + 3 + 2 * 1 <= computed(sim) <= 331 + 3 + 2 * 11


def test_a_partly_matching_block_is_reused_to_the_token() -> None:
    sim = Simulation(block_size=16, max_model_len=200, prefix_caching=True)
    sim.add(PREFIX[:40], 2)
    sim.run()
    for shared in (39, 37, 33, 17, 16, 5):
        number = sim.add([*PREFIX[:shared], 999], 2)
        plan = sim.step()
        assert starts(plan)[number, 0] == shared
        sim.run()
        assert sim.endings[number].metrics is not None and sim.endings[number].metrics.num_cached_tokens == shared


def test_a_conversation_goes_on_from_its_own_answer() -> None:
    sim = Simulation(block_size=16, max_model_len=200, prefix_caching=True)
    sim.add(PREFIX[:20], 30, seed=1)
    sim.run()
    history = PREFIX[:20] + sim.outputs[0]
    number = sim.add([*history, 901, 902], 2)
    assert starts(sim.step())[number, 0] == len(history) - 1, "the last token of the answer was never computed"


def test_a_full_hit_still_computes_the_last_token() -> None:
    sim = Simulation(block_size=16, max_model_len=200, prefix_caching=True)
    for _ in range(3):
        number = sim.add(PREFIX[:64], 3, seed=9)
        plan = sim.step()
        assert plan is not None
        assert starts(plan)[number, 0] == (63 if number else 0)
        sim.run()
    assert sim.outputs[0] == sim.outputs[1] == sim.outputs[2]


def test_what_an_aborted_request_had_not_computed_is_not_found() -> None:
    sim = Simulation(block_size=16, max_model_len=200, max_num_batched_tokens=40, prefix_caching=True)
    sim.add(PREFIX[:100], 3)
    sim.step()
    sim.step(abort_before_commit=0)
    assert sim.endings[0].finish_reason is FinishReason.ABORT
    number = sim.add(PREFIX[:100], 3)
    assert starts(sim.step())[number, 0] == 32, "40 of its tokens had been computed: two blocks"
    sim.run()


def test_those_who_rely_on_an_aborted_promise_are_right() -> None:
    sim = Simulation(block_size=16, max_model_len=200, max_num_batched_tokens=200, prefix_caching=True)
    sim.add(PREFIX[:64], 3)
    sim.add([*PREFIX[:64], 950], 3)
    assert starts(sim.step(abort_before_commit=0)) == {(0, 0): 0, (1, 0): 64}
    number = sim.add([*PREFIX[:64], 960], 3)
    assert starts(sim.step())[number, 0] == 0, "request 1 makes it findable again, but only when its next block fills"
    sim.run()


def test_a_failed_step_leaves_nothing_to_find() -> None:
    sim = Simulation(block_size=16, max_model_len=200, max_num_batched_tokens=200, prefix_caching=True)
    sim.add(PREFIX[:64], 3)
    sim.add([*PREFIX[:64], 950], 3)
    plan = sim.scheduler.schedule(0.0)
    assert plan is not None
    for update in sim.scheduler.fail(plan, EngineError("no"), 1.0):
        sim._end(update)
    sim.scheduler.check()
    assert sim.blocks.stats().cached == 0
    number = sim.add(PREFIX[:64], 3)
    assert starts(sim.step())[number, 0] == 0
    while sim.scheduler.has_work:
        sim.step()


def test_prompt_logprobs_are_computed_in_full_and_leave_blocks_for_others() -> None:
    sim = Simulation(block_size=16, max_model_len=200, prefix_caching=True)
    for prompt_logprobs, start in ((None, 0), (0, 0), (None, 39)):
        number = sim.add(PREFIX[:40], 2, prompt_logprobs=prompt_logprobs)
        assert starts(sim.step())[number, 0] == start
        sim.run()
    sim.scheduler.blocks.reset_prefix_cache()
    for prompt_logprobs, start in ((0, 0), (None, 39)):
        number = sim.add(PREFIX[:40], 2, prompt_logprobs=prompt_logprobs)
        assert starts(sim.step())[number, 0] == start
        sim.run()


def test_salts_and_cache_prefix() -> None:
    sim = Simulation(block_size=16, max_model_len=200, prefix_caching=True)
    expected = {"a": [0, 39, 39], "b": [0, 39, 39], None: [0, 39, 39]}
    for salt, cached in expected.items():
        for start in cached:
            number = sim.add(PREFIX[:40], 2, cache_salt=salt)
            assert starts(sim.step())[number, 0] == start
            sim.run()
    number = sim.add(PREFIX[:40], 2, cache_prefix=False)
    assert starts(sim.step())[number, 0] == 0
    sim.run()
    sim.add([900, *PREFIX[:40]], 2, cache_prefix=False)
    sim.run()
    number = sim.add([900, *PREFIX[:40]], 2)
    assert starts(sim.step())[number, 0] == 0


def test_a_preempted_request_gives_back_only_what_it_alone_holds_and_finds_the_rest_again() -> None:
    sim = Simulation(num_blocks=12, block_size=4, max_model_len=40, prefix_caching=True)
    sim.add(PREFIX[:16], 20, seed=1)
    sim.add([*PREFIX[:16], 900], 20, seed=2)
    sim.add([*PREFIX[:16], 901], 20, seed=3)
    plans = []
    while not sim.requests[2].num_preemptions:
        plans.append(sim.step())
    [lost] = [p for p in plans[-1].preempted if p.was_running]  # type: ignore[union-attr]
    assert (lost.request_id, lost.num_given) == (2, lost.num_needed)
    assert sim.blocks.num_held(2) >= 4
    sim.run()
    again = [plan for plan in sim.runner.plans if any(a.resumed for a in plan.admitted)]
    assert all(start >= 16 for plan in again for (_, _), start in starts(plan).items())


def test_nothing_is_lost_when_the_first_must_take_everything_from_its_siblings() -> None:
    """Nobody owns a block alone: the siblings have to let go of what they share before anything becomes free."""
    sim = Simulation(num_blocks=5, block_size=4, max_model_len=20, max_num_seqs=4, prefix_caching=True)
    sim.add(array("i", range(11)).tolist(), 9, n=4, seed=8)
    sim.run()
    assert len(sim.endings) == 4
