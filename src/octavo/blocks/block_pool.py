"""Stage 3 of 7: the pool that blocks are taken from. Before it: ``scheduler``. After it: ``block_table``.

Free blocks form a doubly linked list, written into two arrays, so that any block can be taken out of it in O(1):

    sentinel -> latest freed ... earliest freed -> least recently freed ... most recently freed -> sentinel
                `-- nothing to find in them --'    `-- findable: their tokens may be hit again --'
       handed out from this end                                         the end that lives longest
"""

from __future__ import annotations

from array import array
from itertools import pairwise

from octavo.errors import ConfigError


class BlockPool:
    """``num_blocks`` blocks with reference counts: a block is free (count 0, in the list) or in use (not in it)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"a pool needs at least 1 block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_shared = 0
        """Blocks with a count above 1."""
        self.ref_counts = array("i", [0]) * num_blocks
        # Entry num_blocks of both arrays is the sentinel.
        self._next = array("i", [*range(1, num_blocks + 1), 0])
        self._prev = array("i", [num_blocks, *range(num_blocks)])

    def allocate(self, count: int) -> list[int]:
        """Take the first ``count`` free blocks; each comes with a count of 1."""
        assert 0 <= count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        following, sentinel, block = self._next, self.num_blocks, self._next[self.num_blocks]
        taken = []
        for _ in range(count):
            taken.append(block)
            self.ref_counts[block] = 1
            block = following[block]
        following[sentinel] = block
        self._prev[block] = sentinel
        self.num_free -= count
        return taken

    def share(self, block: int) -> None:
        """Count one more owner; a free block is taken out of the list, wherever it is."""
        count = self.ref_counts[block]
        if count == 0:
            before, after = self._prev[block], self._next[block]
            self._next[before], self._prev[after] = after, before
            self.num_free -= 1
        elif count == 1:
            self.num_shared += 1
        self.ref_counts[block] = count + 1

    def release(self, block: int, findable: bool = False) -> bool:
        """Count one owner less. Returns whether the block became free.

        A ``findable`` block, whose tokens a later request may hit, goes to the end that is handed out last.
        """
        count = self.ref_counts[block]
        assert count > 0, f"block {block} is released but nobody owns it"
        self.ref_counts[block] = count - 1
        if count > 1:
            self.num_shared -= count == 2
            return False
        before = self._prev[self.num_blocks] if findable else self.num_blocks
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1
        return True

    def free_blocks(self, most: int | None = None) -> list[int]:
        """The free blocks in the order they would be handed out, or the first ``most`` of them."""
        limit = self.num_blocks + 1 if most is None else most
        blocks: list[int] = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks and len(blocks) < limit:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def check(self) -> None:
        """Prove that list, links and counts agree; AssertionError says where they do not."""
        free = self.free_blocks()
        assert len(free) == self.num_free, f"free list holds {len(free)} blocks, num_free says {self.num_free}"
        chain = [self.num_blocks, *free, self.num_blocks]
        for before, after in pairwise(chain):
            assert self._prev[after] == before, f"block {after} follows {before} but names {self._prev[after]} before it"
        for block in free:
            assert self.ref_counts[block] == 0, f"free block {block} has {self.ref_counts[block]} owners"
        owned = sum(count > 0 for count in self.ref_counts)
        assert owned + len(free) == self.num_blocks, f"{owned} owned and {len(free)} free blocks of {self.num_blocks}: some are lost"
        shared = sum(count > 1 for count in self.ref_counts)
        assert shared == self.num_shared, f"{shared} blocks are shared, num_shared says {self.num_shared}"
