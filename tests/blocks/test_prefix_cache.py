"""Forks and the prefix cache: exact cases, and random operations against a dictionary of token tuples."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.blocks import BlockManager
from octavo.blocks.prefix_index import MAX_CHILDREN_SEARCHED


def tokens(*parts: int | range) -> array[int]:
    return array("i", [token for part in parts for token in (part if isinstance(part, range) else [part])])


def run(blocks: BlockManager, request_id: int, known: array[int], salt: str | None = None, reads: bool = True) -> int | None:
    """Admit a request and compute all of its tokens in one step. Returns how many were found, None if it does not fit."""
    found = blocks.admit(request_id, known, salt, reads=reads, leaves=True)
    if found is not None:
        assert blocks.reserve(request_id, len(known)) is not None
        blocks.end_step()
        blocks.check()
    return found


# ---------------------------------------------------------------- forks


def test_a_fork_shares_everything_and_copies_one_block_at_its_first_write() -> None:
    blocks = BlockManager(8, 4)
    blocks.reserve(1, 10)
    blocks.fork(1, 2, array("i"))
    assert (blocks.block_ids(2), blocks.num_free, blocks.stats().saved) == (blocks.block_ids(1), 5, 3)
    assert (blocks.num_missing(2, 11), blocks.num_missing(1, 11), blocks.num_missing(1, 10)) == (1, 1, 0)
    assert blocks.reserve(2, 11) == [3]
    assert (blocks.copies, blocks.block_ids(2).tolist()) == ({3: 2}, [0, 1, 3])
    assert blocks.reserve(1, 11) == [], "the last owner writes in place, while the copy's source is still pinned"
    blocks.check()
    blocks.end_step()
    assert (blocks.copies, blocks.pool.ref_counts[2], blocks.sharing.num_forks, blocks.sharing.num_fork_copies) == ({}, 1, 1, 1)
    blocks.release(1)
    blocks.release(2)
    assert blocks.num_free == 8
    blocks.check()


def test_of_n_owners_all_but_one_copy_and_full_blocks_never_are() -> None:
    blocks = BlockManager(20, 4)
    blocks.reserve(0, 8)
    for child in range(1, 5):
        blocks.fork(0, child, array("i"))
    for request in range(5):
        assert len(blocks.reserve(request, 9) or []) == 1
    assert blocks.sharing.num_fork_copies == 0 and not blocks.copies
    for child in range(5, 8):
        blocks.fork(4, child, array("i"))
    for request in range(4, 8):
        blocks.reserve(request, 10)
    assert blocks.sharing.num_fork_copies == len(blocks.copies) == 3
    blocks.end_step()
    blocks.check()


def test_a_source_is_not_handed_out_before_its_copy_has_run() -> None:
    blocks = BlockManager(3, 4)
    blocks.reserve(1, 2)
    blocks.fork(1, 2, array("i"))
    blocks.reserve(1, 3)
    blocks.release(2)
    assert (blocks.num_free, blocks.reserve(3, 8)) == (1, None)
    blocks.end_step()
    assert blocks.num_free == 2 and blocks.reserve(3, 8) is not None
    blocks.check()


def test_a_copy_that_has_no_room_changes_nothing() -> None:
    blocks = BlockManager(2, 4)
    blocks.reserve(1, 6)
    blocks.fork(1, 2, array("i"))
    assert (blocks.reserve(1, 7), blocks.num_room(1), blocks.copies) == (None, 0, {})
    blocks.release(2)
    assert blocks.num_room(1) == 2 and blocks.reserve(1, 7) == []
    blocks.check()


# ---------------------------------------------------------------- what is found


def test_hits_are_counted_by_the_token_and_leave_the_last_one() -> None:
    blocks = BlockManager(32, 4)
    assert run(blocks, 1, tokens(range(12))) == 0
    assert run(blocks, 2, tokens(range(12))) == 11, "a full hit: two blocks shared, the third copied but for its last token"
    assert run(blocks, 3, tokens(range(10), 99, 98)) == 10
    assert run(blocks, 4, tokens(range(8))) == 7
    assert run(blocks, 5, tokens(5, range(12))) == 0
    shared = [blocks.block_ids(request).tolist()[:2] for request in (1, 2, 3)]
    assert shared[0] == shared[1] == shared[2]
    counts = blocks.sharing
    assert (counts.num_queries, counts.num_hits, counts.num_tokens_saved, counts.num_blocks_shared) == (5, 3, 11 + 10 + 7, 2 + 2 + 1)
    assert counts.num_prefix_copies == 3


def test_the_unfilled_end_of_an_ended_request_is_found() -> None:
    blocks = BlockManager(32, 4)
    run(blocks, 1, tokens(range(7)))
    assert run(blocks, 2, tokens(range(9))) == 4, "its owner still writes into the second block"
    blocks.release(1, num_computed=7)
    assert run(blocks, 3, tokens(range(6), 50, 51)) == 6
    assert run(blocks, 4, tokens(range(9))) == 8, "by now request 2 has filled it"


def test_equal_blocks_after_different_parents_are_different() -> None:
    blocks = BlockManager(32, 4)
    run(blocks, 1, tokens(range(4), range(50, 54), 0))
    run(blocks, 2, tokens(range(10, 14), range(60, 64), 0))
    assert run(blocks, 3, tokens(range(10, 14), range(50, 54), 0)) == 4
    assert run(blocks, 4, tokens(range(50, 54), range(50, 54), 0)) == 0
    assert len({blocks.block_ids(request)[1] for request in (1, 2, 3, 4)}) == 4


def test_salts_share_nothing_and_see_the_same_counts() -> None:
    blocks = BlockManager(64, 4)
    counts: dict[str | None, list[int | None]] = {}
    for number, salt in enumerate((None, "a", "b", "")):
        counts[salt] = [run(blocks, 10 * number + i, tokens(range(length)), salt) for i, length in enumerate((9, 9, 14, 6))]
    assert all(found == [0, 8, 8, 5] for found in counts.values())
    held = [set(blocks.block_ids(10 * number)) for number in range(4)]
    assert not set.intersection(*held) and sum(map(len, held)) == len(set.union(*held))


def test_a_promise_is_found_at_once_but_not_copied_from() -> None:
    blocks = BlockManager(32, 4)
    blocks.admit(1, tokens(range(11)), reads=True, leaves=True)
    blocks.reserve(1, 11)
    assert blocks.admit(2, tokens(range(11)), reads=True, leaves=True) == 8
    assert blocks.admit(3, tokens(range(6)), reads=True, leaves=True) == 4
    blocks.reserve(3, 6)
    assert blocks.admit(4, tokens(range(6)), reads=True, leaves=True) == 4


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_what_was_not_computed_is_not_found(how: str) -> None:
    blocks = BlockManager(32, 4)
    run(blocks, 1, tokens(range(5)))
    blocks.admit(2, tokens(range(16)), reads=True, leaves=True)
    blocks.reserve(2, 16)
    blocks.admit(3, tokens(range(20)), reads=True, leaves=True)
    blocks.reserve(3, 20)
    if how == "fail":
        blocks.end_step(failed=True)
        blocks.release(3, num_computed=16)
    blocks.release(2, num_computed=4)
    blocks.end_step()
    blocks.check()
    assert run(blocks, 4, tokens(range(20))) == 4


def test_a_chain_is_findable_again_after_a_block_before_it_was_lost() -> None:
    blocks = BlockManager(6, 4)
    run(blocks, 1, tokens(range(4)))
    known = tokens(range(8))
    run(blocks, 2, known, reads=False)
    blocks.release(1)
    assert run(blocks, 3, tokens(range(100, 117))) is None
    known.extend([8, 9, 10, 11, 12])
    blocks.reserve(3, 13)  # takes the first block of request 1, which stood for that of request 2
    blocks.check()
    blocks.release(3)
    assert blocks.num_evictions == 2
    blocks.reserve(2, 12)
    blocks.end_step()
    assert run(blocks, 4, tokens(range(13))) == 12
    assert blocks.block_ids(4)[:3] == blocks.block_ids(2)


def test_the_least_recently_used_goes_first_and_what_holds_nothing_before_it() -> None:
    blocks = BlockManager(8, 2)
    for request in range(3):
        run(blocks, request, tokens(100 * request, 1))
    for request in (1, 0, 2):
        blocks.release(request, num_computed=2)
    assert blocks.stats().cached == 3
    run(blocks, 3, tokens(100, 1, 7))  # request 1's block is used again
    blocks.release(3)
    blocks.reserve(4, 14)  # leaves one block
    assert (blocks.stats().cached, blocks.num_evictions) == (1, 2)
    blocks.release(4)
    assert run(blocks, 5, tokens(100, 1, 7)) == 2
    assert run(blocks, 6, tokens(0, 1, 7)) == 0


def test_no_more_than_so_many_children_are_looked_at() -> None:
    blocks = BlockManager(64, 4)
    for child in range(MAX_CHILDREN_SEARCHED + 1):
        run(blocks, child, tokens(range(4), child, child, child, child))
    assert run(blocks, 90, tokens(range(4), 0, 0, 7, 7, 7)) == 4
    assert run(blocks, 91, tokens(range(4), 2, 2, 7, 7, 7)) == 6


def test_a_request_that_may_not_is_kept_out_and_a_reset_forgets() -> None:
    blocks = BlockManager(32, 4)
    known = tokens(range(9))
    blocks.admit(1, known, reads=False, leaves=False)
    blocks.reserve(1, 9)
    blocks.end_step()
    assert run(blocks, 2, tokens(range(9))) == 0
    assert run(blocks, 3, tokens(range(9)), reads=False) == 0
    assert blocks.admit(4, tokens(range(9)), reads=False, leaves=False) == 0
    blocks.reset_prefix_cache()
    assert run(blocks, 5, tokens(range(9))) == 0
    for request in (2, 3):
        blocks.release(request, num_computed=9)
    assert run(blocks, 6, tokens(range(9))) == 8
    assert BlockManager(4, 4, prefix_caching=False).admit(1, known, reads=True, leaves=True) == 0


def test_a_found_block_takes_room_only_where_nobody_holds_it() -> None:
    blocks = BlockManager(4, 4)
    run(blocks, 1, tokens(range(9)))
    assert blocks.admit(2, tokens(range(14)), reads=True, leaves=True) is None
    assert run(blocks, 2, tokens(range(12))) == 8
    blocks.release(1)
    blocks.release(2)
    assert run(blocks, 3, tokens(range(16))) == 12
    blocks.release(3)
    assert run(blocks, 4, tokens(range(16))) == 12, "three of the fourth block's tokens are cached, but no block is left to copy them to"


def test_a_block_that_will_be_written_again_is_not_found() -> None:
    blocks = BlockManager(8, 4)
    run(blocks, 1, tokens(range(9)))
    blocks.truncate(1, 6)
    blocks.check()
    assert run(blocks, 2, tokens(range(9))) == 8
    blocks.reserve(1, 7)
    blocks.check()
    assert run(blocks, 3, tokens(range(9))) == 8, "it was copied, as request 2 holds it too"
    blocks.truncate(3, 6)
    blocks.truncate(2, 4)
    blocks.reserve(3, 7)
    blocks.check()
    assert run(blocks, 4, tokens(range(9))) == 4


def test_damage_is_noticed() -> None:
    blocks = BlockManager(8, 4)
    run(blocks, 1, tokens(range(5)))
    blocks._tables[1].token_ids[2] = 7
    with pytest.raises(AssertionError, match="found by other tokens than it holds"):
        blocks.check()
    blocks = BlockManager(8, 4)
    run(blocks, 1, tokens(range(9)))
    blocks.release(1)
    blocks._cache.num_cached += 1
    with pytest.raises(AssertionError, match="2 free blocks can be found, but 3 were counted"):
        blocks.check()


# ---------------------------------------------------------------- random operations


class Found:
    """The cache as a dictionary: (salt, all tokens up to the end of the block) -> (block, owner, computed)."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.entries: dict[tuple[str | None, tuple[int, ...]], tuple[int, int, bool]] = {}

    def fill(self, owner: int, salt: str | None, known: list[int], table: list[int]) -> None:
        """Every filled block that has no like can be found from now on."""
        for position, end in enumerate(range(self.size, len(known) + 1, self.size)):
            self.entries.setdefault((salt, tuple(known[:end])), (table[position], owner, False))

    def end(self, owner: int, salt: str | None, known: list[int], table: list[int]) -> None:
        self.entries.setdefault((salt, tuple(known)), (table[-1], owner, True))

    def forget(self, gone: list[tuple[str | None, tuple[int, ...]]]) -> None:
        """These can no longer be found, nor what follows them."""
        for salt, prefix in gone:
            for key in list(self.entries):
                if key == (salt, prefix) or (key[0] == salt and len(prefix) % self.size == 0 and key[1][: len(prefix)] == prefix):
                    del self.entries[key]

    def forget_blocks(self, blocks: list[int]) -> None:
        self.forget([key for key, (block, _, _) in self.entries.items() if block in blocks])

    def forget_promises(self, owner: int | None = None) -> None:
        self.forget([key for key, (_, by, ready) in self.entries.items() if not ready and owner in (None, by)])

    def settle(self) -> None:
        self.entries = {key: (block, owner, True) for key, (block, owner, _) in self.entries.items()}

    def longest(self, salt: str | None, known: list[int]) -> tuple[list[int], int]:
        """Blocks to share, and tokens to copy from the block that goes on most alike."""
        blocks: list[int] = []
        while (end := (len(blocks) + 1) * self.size) < len(known) and (salt, tuple(known[:end])) in self.entries:
            blocks.append(self.entries[salt, tuple(known[:end])][0])
        start, most = len(blocks) * self.size, 0
        for (other, prefix), (_, _, ready) in self.entries.items():
            if other == salt and ready and prefix[:start] == tuple(known[:start]) and start < len(prefix) <= start + self.size:
                common = next(
                    (i for i, (a, b) in enumerate(zip(prefix, known[:-1], strict=False)) if a != b), min(len(prefix), len(known) - 1)
                )
                most = max(most, common - start)
        return blocks, most


class Holder:
    """A request: all its tokens known, how many are covered and computed."""

    def __init__(self, salt: str | None, caching: bool, known: list[int]) -> None:
        self.salt, self.caching, self.known = salt, caching, array("i", known)
        self.computed = 0
        self.busy = False
        """Whether the step now planned computes some of its tokens."""


class SharingMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(3, 20), block_size=st.sampled_from([1, 2, 4]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.size = block_size
        self.found = Found(block_size)
        self.holders: dict[int, Holder] = {}
        self.contents: dict[int, tuple[int, ...]] = {}
        """Slot -> all tokens up to the one in it, as computed."""
        self.writes: list[tuple[list[int], list[int], int, int]] = []
        """(table, tokens, start, end) of the step now planned."""
        self.number = 0

    def write(self, request_id: int, start: int) -> None:
        holder, table = self.holders[request_id], self.blocks.block_ids(request_id).tolist()
        end = self.blocks.num_tokens(request_id)
        self.writes.append((table, holder.known.tolist(), start, end))
        holder.busy = True
        if holder.caching and end // self.size > start // self.size:
            self.found.fill(request_id, holder.salt, holder.known[:end].tolist(), table)

    @rule(known=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from([None, None, "s"]), caching=st.booleans())
    def admit(self, known: list[int], salt: str | None, caching: bool) -> None:
        if len(self.holders) == 5:
            return
        request_id = self.number = self.number + 1
        holder = Holder(salt, caching, known)
        share, copied = self.found.longest(salt, known) if caching else ([], 0)
        free = set(self.blocks.pool.free_blocks())
        got = self.blocks.admit(request_id, holder.known, salt, reads=caching, leaves=caching)
        needed = -(-len(known) // self.size) - len(set(share) - free)
        if got is None:
            assert needed > len(free)
            return
        assert needed <= len(free)
        shared = len(share) * self.size
        # The copy is left out only where its source would have to be pinned in the last free block.
        assert got == shared + copied or (got == shared and needed == len(free))
        self.holders[request_id] = holder
        table = self.blocks.block_ids(request_id).tolist()
        assert table[: len(share)] == share
        self.found.forget_blocks(table[len(share) :])
        before = len(table)
        assert self.blocks.reserve(request_id, len(known)) is not None
        self.found.forget_blocks(self.blocks.block_ids(request_id).tolist()[before:])
        self.write(request_id, got)

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, data: st.DataObject, more: list[int]) -> None:
        if (request_id := self.pick(data)) is None:
            return
        holder, start, free = self.holders[request_id], self.blocks.num_tokens(request_id), self.blocks.num_free
        missing, room = self.blocks.num_missing(request_id, start + len(more)), self.blocks.num_room(request_id)
        assert (missing <= free) == (len(more) <= room)
        last = self.blocks.block_ids(request_id)[-1:].tolist() if start % self.size else []
        holder.known.extend(more)
        new = self.blocks.reserve(request_id, start + len(more))
        if new is None:
            assert missing > free
            del holder.known[start:]
            return
        assert len(new) == missing <= free
        self.found.forget_blocks(new)
        if last and last[0] in self.blocks.block_ids(request_id):
            self.found.forget_blocks(last)  # it was written again in place
        self.write(request_id, start)

    def pick(self, data: st.DataObject) -> int | None:
        """A request that has nothing to do in this step yet."""
        idle = [i for i, holder in self.holders.items() if not holder.busy]
        return data.draw(st.sampled_from(idle)) if idle else None

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        request_id = self.pick(data)
        if request_id is None or len(self.holders) == 5:
            return
        self.number += 1
        parent = self.holders[request_id]
        child = self.holders[self.number] = Holder(parent.salt, parent.caching, parent.known.tolist())
        child.computed = parent.computed
        self.blocks.fork(request_id, self.number, child.known)
        assert self.blocks.block_ids(self.number) == self.blocks.block_ids(request_id)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request_id = self.pick(data)
        if request_id is None:
            return
        holder, table = self.holders.pop(request_id), self.blocks.block_ids(request_id).tolist()
        alone = bool(table) and self.blocks.pool.ref_counts[table[-1]] == 1
        findable = bool(table) and table[-1] in [block for block, _, _ in self.found.entries.values()]
        if holder.caching and holder.computed % self.size and alone and not findable:
            self.found.fill(request_id, holder.salt, holder.known.tolist(), table)
            self.found.end(request_id, holder.salt, holder.known.tolist(), table)
        self.blocks.release(request_id, num_computed=holder.computed)

    @rule(data=st.data(), share=st.floats(0, 1))
    def truncate(self, data: st.DataObject, share: float) -> None:
        request_id = self.pick(data)
        if request_id is None:
            return
        holder = self.holders[request_id]
        keep = int(holder.computed * share)
        self.blocks.truncate(request_id, keep)
        holder.computed = keep
        del holder.known[keep:]

    @precondition(lambda self: self.writes)
    @rule()
    def commit(self) -> None:
        self.perform()
        self.blocks.end_step()
        self.found.settle()
        for request_id, holder in self.holders.items():
            holder.computed, holder.busy = self.blocks.num_tokens(request_id), False
            assert len(holder.known) == holder.computed

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def abort_before_commit(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from([i for i, holder in self.holders.items() if holder.busy]))
        self.blocks.release(request_id, num_computed=self.holders.pop(request_id).computed)
        self.found.forget_promises(request_id)
        self.commit()

    @precondition(lambda self: self.writes)
    @rule()
    def fail(self) -> None:
        self.writes.clear()
        self.blocks.end_step(failed=True)
        self.found.forget_promises()
        for request_id in [i for i, holder in self.holders.items() if holder.busy]:
            self.blocks.release(request_id, num_computed=self.holders.pop(request_id).computed)

    def perform(self) -> None:
        """The step: copies, then all writes, then every request reads back all of its own tokens."""
        size = self.size
        assert not self.blocks.copies.keys() & set(self.blocks.copies.values()), "a target is a source"
        for target, source in self.blocks.copies.items():
            for offset in range(size):
                self.contents[target * size + offset] = self.contents.get(source * size + offset, ())
        for table, known, start, end in self.writes:
            for position in range(start, end):
                self.contents[table[position // size] * size + position % size] = tuple(known[: position + 1])
        self.writes.clear()
        for request_id, holder in self.holders.items():
            table = self.blocks.block_ids(request_id)
            for position in range(self.blocks.num_tokens(request_id)):
                assert self.contents[table[position // size] * size + position % size] == tuple(holder.known[: position + 1])

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check()
        ours = {block: prefix for (_, prefix), (block, _, _) in self.found.entries.items()}
        assert {entry.block for entry in self.blocks._cache.index} == ours.keys()
        for entry in self.blocks._cache.index:
            assert array("i", entry.tokens).tolist() == list(ours[entry.block][(len(ours[entry.block]) - 1) // self.size * self.size :])


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
