"""The arena against a brute-force map of slots; the contiguous managers under the real scheduler."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import SchedulerConfig
from octavo.errors import ConfigError
from octavo.planner.accounting import Usage, UsageMean, usage
from octavo.planner.allocators import SCHEMES, Arena, ContiguousManager
from octavo.planner.latency_model import LinearLatency
from octavo.planner.replica import Replica, SimConfig
from octavo.planner.static_batching import StaticBatching
from octavo.planner.workload import SimRequest, own_run, shared_run

LATENCY = LinearLatency(per_step=0.01, per_token=0.001)


@given(st.integers(0, 10**6), st.integers(20, 200), st.sampled_from(["first_fit", "buddy"]))
@settings(max_examples=40, deadline=None)
def test_arena_against_a_map_of_slots(seed: int, size: int, placement: str) -> None:
    chance, arena = random.Random(seed), Arena(size, placement)  # type: ignore[arg-type]
    taken = [False] * size
    regions: list[tuple[int, int]] = []
    for _ in range(60):
        wanted = chance.randint(1, size // 3)
        whole = 1 << (wanted - 1).bit_length() if placement == "buddy" else wanted
        step = whole if placement == "buddy" else 1
        expected = next((s for s in range(0, size - whole + 1, step) if not any(taken[s : s + whole])), None)
        assert arena.find(wanted) == expected
        if expected is not None and chance.random() < 0.6:
            arena.take(expected, wanted)
            taken[expected : expected + whole] = [True] * whole
            regions.append((expected, wanted))
        elif regions:
            start, length = regions.pop(chance.randrange(len(regions)))
            arena.give(start, length)
            whole = arena.rounded(length)
            taken[start : start + whole] = [False] * whole
        assert arena.num_free == taken.count(False)
        assert arena.num_useless(wanted) == useless(taken, arena.rounded(wanted), step)


def useless(taken: list[bool], whole: int, step: int) -> int:
    """Slots of the holes in which nothing of this size can lie."""
    count = start = 0
    for end in range(len(taken) + 1):
        if end == len(taken) or taken[end]:
            fits = any(s + whole <= end for s in range(start, end) if s % step == 0)
            count += 0 if fits else end - start
            start = end + 1
    return count


def test_misuse_of_the_arena_is_our_own_bug() -> None:
    arena = Arena(10)
    arena.take(2, 3)
    with pytest.raises(AssertionError):
        arena.take(4, 2)
    with pytest.raises(AssertionError):
        arena.give(0, 2)
    with pytest.raises(ConfigError):
        Arena(0)


class Conserving(UsageMean):
    """Checks at every step that the kinds add up, and that what is used is what tables cover."""

    replica: Replica

    def add(self, seconds: float, running: int, slots: Usage) -> None:
        assert slots.used + slots.reserved + slots.internal + slots.external + slots.free == slots.total
        assert min(slots) >= 0
        blocks = self.replica.blocks
        covered = sum(map(blocks.num_tokens, blocks.request_ids))  # of a static batch: those that have not ended
        if isinstance(blocks, ContiguousManager):
            blocks.check()
        # Blocks may be in several tables, and sources of copies in none.
        if isinstance(blocks, StaticBatching) or blocks.prefix_caching or blocks.sharing.num_forks:
            assert slots.used <= covered + len(blocks.copies) * blocks.block_size
        else:
            assert slots.used == covered
        super().add(seconds, running, slots)


requests_strategy = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 23), st.integers(0, 2), st.sampled_from([1, 1, 1, 3])), min_size=1, max_size=24
)  # fmt: skip


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("scheme", ["paged", *SCHEMES])
@given(
    shapes=requests_strategy,
    slots=st.integers(64, 200),
    placement=st.sampled_from(["first_fit", "buddy"]),
    caching=st.booleans(),
    beams=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_slots_are_conserved_at_every_step_and_all_requests_finish(
    scheme: str, batching: str, shapes: list[tuple[int, int, int, int]], slots: int, placement: str, caching: bool, beams: bool
) -> None:
    config = SimConfig(slots, scheme, 4, SchedulerConfig(8, 32), 63, caching, placement, batching)  # type: ignore[arg-type]
    replica = Replica(0, config, LATENCY)
    mean = Conserving()
    mean.replica = replica
    replica.runner.counts.every = mean
    ended, asked, alike = [], list[int](), (scheme, batching) == ("paged", "continuous") and beams
    for number, (prompt, output, prefix, n) in enumerate(shapes):
        runs = (shared_run(prefix, prompt // 2), own_run(number, prompt - prompt // 2))
        request = SimRequest(number, 0.0, tuple(run for run in runs if run.length), output, n=n, beams=alike and n > 1)
        refused = replica.submit(request, replica.clock.now)
        assert refused is None or request.beams  # of which the whole memory may hold too few
        asked += [number] * (refused is None)
        if number % 3 == 0 and replica.core.has_work:
            ended += replica.step(replica.clock.now)
            replica.core.check()
    while replica.core.has_work:
        ended += replica.step(replica.clock.now)
        replica.core.check()
    assert sorted(r.request.id for r in ended) == asked
    assert all(r.num_output == r.request.n * r.request.output_len for r in ended)
    assert replica.blocks.num_free == replica.blocks.num_blocks and not replica.runner.final_tokens.keys() & replica.live.keys()


def run(scheme: str, shapes: list[tuple[int, int]], slots: int, max_model_len: int = 64) -> Replica:
    """All at once, to the end."""
    replica = Replica(0, SimConfig(slots, scheme, 4, SchedulerConfig(16, 256), max_model_len), LATENCY)
    for number, (prompt, output) in enumerate(shapes):
        replica.submit(SimRequest(number, 0.0, (own_run(number, prompt),), output), 0.0)
    while replica.core.has_work:
        replica.step(replica.clock.now)
    return replica


# 200 slots; requests of 14 + 17 tokens reserve 64, 14 + 32, 31, and at first 16 or 4 blocks of 4.
@pytest.mark.parametrize(
    ("scheme", "at_once"),
    [("maximum", 200 // 64), ("power_of_two", 200 // 46), ("oracle", 200 // 31), ("growing", 200 // 16), ("paged", 50 // 4)],
)
def test_how_many_run_at_once(scheme: str, at_once: int) -> None:
    assert run(scheme, [(14, 17)] * 16, 200).runner.counts.every.max_running == at_once


def test_growing_copies_what_it_held() -> None:
    replica = run("growing", [(10, 30)], 128)
    # Regions of 16, 32 and 64: 16 and 32 tokens are moved when the 17th and 33rd are scheduled.
    assert isinstance(replica.blocks, ContiguousManager)
    assert replica.blocks.num_slots_copied == 16 + 32 and replica.blocks.num_stalls == 0


def test_growing_starts_anew_where_old_and_new_do_not_fit_together() -> None:
    replica = run("growing", [(10, 50)], 64)
    assert isinstance(replica.blocks, ContiguousManager)
    # 16 -> 32 fits beside it; 64 does not, so the request gives up its 32 and computes them again.
    assert replica.blocks.num_stalls >= 1 and replica.core.stats()["num_preemptions"] >= 1
    assert replica.core.stats()["num_tokens_generated"] == 50


def test_a_static_batch_waits_for_its_longest() -> None:
    config = SimConfig(128, "maximum", 4, SchedulerConfig(16, 256), 64, batching="static")
    replica = Replica(0, config, LATENCY)
    for number, output in enumerate([2, 20, 5]):
        replica.submit(SimRequest(number, 0.0, (own_run(number, 4),), output), 0.0)
    records = []
    while replica.core.has_work:
        records += replica.step(replica.clock.now)
    ends = {r.request.id: r.metrics.finish_time for r in records if r.metrics is not None}
    assert ends[0] == ends[1] < ends[2]
    admitted = {r.request.id: r.metrics.admitted_time for r in records if r.metrics is not None}
    assert admitted[2] == ends[1]


@pytest.mark.parametrize("scheme", ["paged", *SCHEMES])
def test_any_memory_can_be_batched_statically(scheme: str) -> None:
    """Two batches: what the first one's ended requests hold is waste, and is no more than is needed."""
    config = SimConfig(160, scheme, 4, SchedulerConfig(2, 256), 64, batching="static")
    replica = Replica(0, config, LATENCY)
    for number, output in enumerate([2, 20, 5]):
        replica.submit(SimRequest(number, 0.0, (own_run(number, 5),), output), 0.0)
    ends, wasted, rows = {}, [], []
    while replica.core.has_work:
        ends |= {r.request.id: r.metrics.finish_time for r in replica.step(replica.clock.now) if r.metrics is not None}
        assert isinstance(replica.blocks, StaticBatching)
        rows.append(replica.blocks.num_empty_rows)
        wasted.append(usage(replica.blocks, replica.runner.final_tokens).internal)
    assert ends[0] == ends[1] < ends[2] and set(rows) == {0, 1}
    assert max(wasted) >= 6 and wasted[-1] == 0  # the 5 + 1 tokens of the first request
    assert replica.blocks.num_free == replica.blocks.num_blocks


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len=64"):
        SimConfig(60, "maximum", max_model_len=64).manager({})
    with pytest.raises(ConfigError, match="growing"):
        SimConfig(60, "slabs").manager({})
