"""Tables and their blocks: exact cases, and random operations against a model that keeps a slot per token."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.blocks import BlockManager, blocks_for


@pytest.mark.parametrize(("num_tokens", "expected"), [(32, 2), (50, 4), (17, 2), (80, 5), (0, 0), (1, 1), (16, 1)])
def test_blocks_for(num_tokens: int, expected: int) -> None:
    assert blocks_for(num_tokens, 16) == expected


def test_blocks_for_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        blocks_for(1, 0)
    with pytest.raises(ValueError, match="cannot be negative, as -1 is"):
        blocks_for(-1, 16)
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        BlockManager(4, 0)


def test_reserve_is_all_or_nothing_and_takes_no_more_than_needed() -> None:
    blocks = BlockManager(4, 16)
    assert blocks.reserve(7, 17) == [0, 1]
    assert blocks.reserve(7, 32) == []
    assert blocks.reserve(8, 33) is None
    assert (blocks.num_free, blocks.num_held(8), blocks.request_ids) == (2, 0, {7})
    assert blocks.reserve(8, 1) == [2]
    assert blocks.reserve(8, 33) is None
    assert (blocks.num_tokens(8), blocks.block_ids(8).tolist()) == (1, [2])
    blocks.check()


def test_release_goes_from_the_last_block_to_the_first() -> None:
    blocks = BlockManager(4, 1)
    blocks.reserve(1, 3)
    blocks.release(1)
    blocks.release(1)
    assert blocks.pool.free_blocks() == [0, 1, 2, 3]
    blocks.check()


def test_truncate_gives_up_the_tail_alone() -> None:
    blocks = BlockManager(6, 4)
    blocks.reserve(1, 18)
    assert blocks.num_tokens_without([1], 2) == 12
    assert blocks.truncate(1, 12) == 2
    assert (blocks.block_ids(1).tolist(), blocks.num_tokens(1), blocks.num_free) == ([0, 1, 2], 12, 3)
    assert blocks.truncate(1, 11) == 0
    assert blocks.truncate(1, 0) == 3
    blocks.check()


def test_a_shared_tail_is_worth_nothing() -> None:
    blocks = BlockManager(6, 4)
    blocks.reserve(1, 16)
    blocks.pool.share(2)
    assert blocks.owns_any_alone([1])
    assert blocks.num_tokens_without([1], 1) == 12
    assert blocks.num_tokens_without([1], 2) == 4
    assert blocks.truncate(1, 4) == 2
    assert blocks.stats().shared == 0 and blocks.num_free == 4


def test_stats_count_blocks_and_unused_slots() -> None:
    blocks = BlockManager(10, 16)
    blocks.reserve(1, 17)
    blocks.reserve(2, 30)
    stats = blocks.stats()
    assert (stats.total, stats.free, stats.used, stats.cached, stats.shared) == (10, 6, 4, 0, 0)
    assert (stats.used_slots, stats.internal_slots, stats.max_internal_slots) == (64, 15 + 2, 15)


def test_check_notices_damage() -> None:
    blocks = BlockManager(4, 4)
    blocks.reserve(1, 4)
    blocks._tables[1].num_tokens = 5
    with pytest.raises(AssertionError, match="request 1 has 1 blocks for 5 tokens, which need 2"):
        blocks.check()
    blocks._tables[1].block_ids.append(0)
    with pytest.raises(AssertionError, match="has a block twice"):
        blocks.check()
    blocks = BlockManager(4, 4)
    blocks.reserve(1, 4)
    del blocks._tables[1]
    with pytest.raises(AssertionError, match="block 0 is in 0 tables and has a count of 1"):
        blocks.check()


class Model:
    """The obvious bookkeeping: which request owns each block, and a token count per request."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, int] = {}

    @property
    def free(self) -> set[int]:
        return set(range(self.num_blocks)) - {block for table in self.tables.values() for block in table}

    def needed(self, num_tokens: int) -> int:
        return len({position // self.block_size for position in range(num_tokens)})


class Driver:
    """Does one operation to manager and model and compares them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.blocks, self.model = BlockManager(num_blocks, block_size), Model(num_blocks, block_size)

    def reserve(self, request_id: int, more: int) -> None:
        model = self.model
        target = model.tokens.get(request_id, 0) + more
        missing = model.needed(target) - len(model.tables.get(request_id, []))
        free = model.free
        assert self.blocks.num_missing(request_id, target) == missing
        new = self.blocks.reserve(request_id, target)
        if missing > len(free):
            assert new is None
            return
        assert new is not None and len(new) == missing and set(new) <= free
        if target:
            model.tables.setdefault(request_id, []).extend(new)
            model.tokens[request_id] = target

    def truncate(self, request_id: int, share: float) -> None:
        model = self.model
        if request_id in model.tables:
            keep = int(model.tokens[request_id] * share)
            table = model.tables[request_id]
            assert self.blocks.truncate(request_id, keep) == len(table) - model.needed(keep)
            del table[model.needed(keep) :]
            model.tokens[request_id] = keep

    def release(self, request_id: int) -> None:
        self.blocks.release(request_id)
        self.model.tables.pop(request_id, None)
        self.model.tokens.pop(request_id, None)

    def compare(self) -> None:
        self.blocks.check()
        model, stats = self.model, self.blocks.stats()
        assert self.blocks.request_ids == set(model.tables)
        assert set(self.blocks.pool.free_blocks()) == model.free
        for request_id, table in model.tables.items():
            assert self.blocks.block_ids(request_id).tolist() == table
            assert self.blocks.num_tokens(request_id) == model.tokens[request_id]
        assert stats.internal_slots == sum(len(t) * model.block_size - model.tokens[r] for r, t in model.tables.items())
        assert stats.max_internal_slots < model.block_size


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 24), block_size=st.sampled_from([1, 2, 4, 16]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.driver = Driver(num_blocks, block_size)

    @rule(request_id=st.integers(0, 5), more=st.integers(0, 40))
    def reserve(self, request_id: int, more: int) -> None:
        self.driver.reserve(request_id, more)

    @rule(request_id=st.integers(0, 5), share=st.floats(0, 1))
    def truncate(self, request_id: int, share: float) -> None:
        self.driver.truncate(request_id, share)

    @rule(request_id=st.integers(0, 5))
    def release(self, request_id: int) -> None:
        self.driver.release(request_id)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "driver"):
            self.driver.compare()


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_hundred_thousand_random_operations() -> None:
    rng = random.Random(0)
    driver = Driver(16, 4)
    for _ in range(100_000):
        request_id, draw = rng.randrange(6), rng.random()
        if draw < 0.6:
            driver.reserve(request_id, rng.choice((0, 1, 1, 1, 3, 9, 30)))
        elif draw < 0.85:
            driver.truncate(request_id, rng.random())
        else:
            driver.release(request_id)
        driver.compare()


def test_what_several_tables_lack_together_is_what_reserving_takes() -> None:
    """Random forks of forks, some forked by an outsider too; the books say how many blocks a common step takes."""
    for seed in range(60):
        chance = random.Random(seed)
        blocks = BlockManager(64, 4, prefix_caching=False)
        blocks.reserve(0, chance.randint(1, 13))
        for child in range(1, chance.randint(2, 6)):
            parent = chance.randrange(child)
            blocks.fork(parent, child, array("i"))
            if chance.random() < 0.5:
                blocks.reserve(child, blocks.num_tokens(child) + chance.randint(1, 6))
        blocks.end_step()
        group = chance.sample(sorted(blocks.request_ids), chance.randint(1, len(blocks.request_ids)))
        ends = {member: blocks.num_tokens(member) + chance.randint(0, 6) for member in group}
        missing, free = blocks.num_missing_together(ends), blocks.num_free
        for member, end in ends.items():
            blocks.reserve(member, end)
        assert free - blocks.num_free == missing
        blocks.end_step()
        wanted = chance.randint(0, 12)
        keep, free = blocks.num_tokens_without(group, wanted), blocks.num_free
        freed = sum(blocks.truncate(member, min(keep, blocks.num_tokens(member))) for member in group)
        assert freed == blocks.num_free - free
        assert freed >= wanted or keep == 0
        blocks.check()


def test_tails_are_cut_no_further_than_needed() -> None:
    blocks = BlockManager(12, 4, prefix_caching=False)
    blocks.reserve(0, 8)
    blocks.fork(0, 1, array("i"))
    for member in (0, 1):
        blocks.reserve(member, 13)
    assert [blocks.num_tokens_without([0, 1], n) for n in (0, 1, 2, 3, 4, 5, 6, 7)] == [16, 12, 12, 8, 8, 4, 0, 0]
    assert [blocks.num_tokens_without([0], n) for n in (1, 2, 3)] == [12, 8, 0]
