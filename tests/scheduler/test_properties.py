"""Random workloads: everything finishes, with the right tokens, within every bound; see ``Simulation`` for what each step asserts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.simulation import Simulation

MAX_MODEL_LEN = 40


@st.composite
def settings_of_engine(draw: st.DrawFn) -> Simulation:
    block_size = draw(st.sampled_from([1, 2, 4, 8, 16, 64]))
    smallest = -(-MAX_MODEL_LEN // block_size)
    return Simulation(
        num_blocks=draw(st.integers(smallest, 3 * smallest)),
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.sampled_from([1, 2, 3, 5, 16, 100])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        max_passed_over=draw(st.integers(0, 4)),
        speculative_tokens=draw(st.sampled_from([0, 0, 1, 3, 9])),
        any_drafts=draw(st.booleans()),
    )


prompt_lens = st.one_of(st.integers(1, 6), st.integers(1, MAX_MODEL_LEN - 1))
arrivals = st.lists(
    st.tuples(
        st.integers(0, 30),  # step of arrival
        prompt_lens,
        st.integers(1, MAX_MODEL_LEN),
        st.integers(-1, 1),  # priority
        st.lists(st.integers(0, 999), max_size=3) | st.just(list(range(0, 1000, 7))),  # stop tokens
        st.none() | st.integers(0, 60),  # step of the abort
        st.booleans(),  # between schedule and commit
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=250, deadline=None)
@given(settings_of_engine(), arrivals)
def test_every_request_finishes_with_its_own_tokens(
    sim: Simulation, work: list[tuple[int, int, int, int, list[int], int | None, bool]]
) -> None:
    work.sort(key=lambda item: item[0])
    ids: dict[int, int] = {}
    # The first in rank computes a token in every step; each arrival may set those behind it back to their start.
    bound = 31 + len(work) * MAX_MODEL_LEN * len(work)
    while len(ids) < len(work) or sim.scheduler.has_work:
        assert sim.steps < bound
        now, during = sim.steps, None
        for index, (arrival, prompt_len, max_tokens, priority, stops, abort, between) in enumerate(work):
            if arrival <= now and index not in ids:
                limit = min(max_tokens, MAX_MODEL_LEN - prompt_len)
                ids[index] = sim.add(prompt_len, limit, priority=priority, seed=index, stop_token_ids=stops, min_tokens=min(2, limit))
            if abort is not None and abort <= now and index in ids and ids[index] not in sim.endings:
                if between and during is None:
                    during = ids[index]
                else:
                    sim.abort(ids[index])
                    sim.scheduler.check()
        if sim.step(during) is None and during is not None:
            sim.abort(during)
    sim.check_end()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 4, 16]))
def test_a_tiny_pool_under_pressure_preempts_and_all_finish(seed: int, block_size: int) -> None:
    sim = Simulation(num_blocks=-(-48 // block_size), block_size=block_size, max_model_len=48, max_num_batched_tokens=20)
    for index in range(8):
        sim.add(1 + (seed + index * 7) % 9, 24 + (seed >> index) % 8, seed=seed + index)
    sim.run()
    assert sum(request.num_preemptions for request in sim.requests.values()) > 0
    assert sim.runner.max_rows > 1
