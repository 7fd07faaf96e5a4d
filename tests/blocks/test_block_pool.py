"""The free list: its order, its counts, and what check() notices."""

from __future__ import annotations

import random

import pytest

from octavo.blocks import BlockPool
from octavo.errors import ConfigError


def test_blocks_come_in_order_and_freed_ones_are_reused_latest_first() -> None:
    pool = BlockPool(5)
    assert pool.allocate(4) == [0, 1, 2, 3]
    for block in (1, 3, 0):
        assert pool.release(block)
    assert pool.free_blocks() == [0, 3, 1, 4]
    assert pool.allocate(2) == [0, 3]
    pool.check()


def test_findable_blocks_are_reused_last_least_recently_freed_first() -> None:
    pool = BlockPool(6)
    pool.allocate(6)
    for block, findable in ((4, True), (1, False), (2, True), (0, False), (5, True)):
        pool.release(block, findable)
    assert pool.free_blocks() == [0, 1, 4, 2, 5]
    pool.check()


def test_a_free_block_is_taken_out_wherever_it_lies() -> None:
    for taken in range(4):
        pool = BlockPool(4)
        pool.share(taken)
        pool.check()
        assert pool.free_blocks() == [block for block in range(4) if block != taken]


def test_a_shared_block_is_free_after_its_last_owner() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.share(block)
    assert (pool.num_shared, pool.ref_counts[block]) == (1, 3)
    assert [pool.release(block) for _ in range(3)] == [False, False, True]
    assert (pool.num_shared, pool.num_free) == (0, 2)
    pool.check()


def test_random_operations_against_a_list() -> None:
    rng = random.Random(1)
    pool, counts = BlockPool(12), [0] * 12
    plain, findable = list(range(12)), list[int]()
    for _ in range(5000):
        block = rng.randrange(12)
        action = rng.choice(("allocate", "share", "release", "release"))
        free = plain + findable
        if action == "allocate":
            taken = pool.allocate(rng.randint(0, min(3, len(free))))
            assert taken == free[: len(taken)]
            plain, findable = plain[len(taken) :], findable[max(0, len(taken) - len(plain)) :]
            for one in taken:
                counts[one] = 1
        elif action == "share":
            pool.share(block)
            counts[block] += 1
            plain, findable = [b for b in plain if b != block], [b for b in findable if b != block]
        elif counts[block]:
            keep = rng.random() < 0.5
            counts[block] -= 1
            assert pool.release(block, keep) == (counts[block] == 0)
            if counts[block] == 0:
                plain, findable = (plain, [*findable, block]) if keep else ([block, *plain], findable)
        assert pool.free_blocks() == plain + findable
        assert pool.ref_counts.tolist() == counts
        pool.check()


def test_misuse_and_damage_are_noticed() -> None:
    with pytest.raises(ConfigError, match="at least 1 block, not 0"):
        BlockPool(0)
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="nobody owns it"):
        pool.release(0)
    with pytest.raises(AssertionError, match="4 blocks wanted, 3 free"):
        pool.allocate(4)
    pool.ref_counts[1] = 1
    with pytest.raises(AssertionError, match="free block 1 has 1 owners"):
        pool.check()
    pool = BlockPool(3)
    pool.allocate(1)
    pool.ref_counts[0] = 0
    with pytest.raises(AssertionError, match="some are lost"):
        pool.check()
    pool = BlockPool(3)
    pool._prev[2] = 0
    with pytest.raises(AssertionError, match="names 0 before it"):
        pool.check()
    pool = BlockPool(3)
    pool._next[2] = 0
    with pytest.raises(AssertionError, match="free list holds 4 blocks"):
        pool.check()
