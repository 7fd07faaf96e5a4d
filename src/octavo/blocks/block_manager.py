"""Stage 3 of 7: gives requests their blocks. Before it: ``scheduler``. After it: ``block_table``.

The scheduler speaks of tokens, the pool of blocks; the manager turns one into the other and owns every table.
Blocks are given as a request needs them, so only the last one of a table is ever partly filled.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass

from octavo.blocks.block_pool import BlockPool
from octavo.blocks.block_table import BlockTable, blocks_for


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Blocks by what they are used for, and slots by kind of waste, at one moment."""

    total: int
    free: int
    """Blocks that can be handed out, with those counted in ``cached``."""
    cached: int
    """Free blocks whose tokens can still be found."""
    used: int
    shared: int
    """Used blocks with more than one owner."""
    used_slots: int
    """Slots of the used blocks."""
    internal_slots: int
    """Of these, the ones that hold no token: the unfilled ends of last blocks."""
    max_internal_slots: int
    """The most such slots of one request; always less than a block."""


class BlockManager:
    """All blocks and all block tables. Requests are known by their id alone."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        blocks_for(0, block_size)
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._tables: dict[int, BlockTable] = {}

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return self.pool.num_free

    @property
    def request_ids(self) -> set[int]:
        """Requests that have a table."""
        return set(self._tables)

    def reserve(self, request_id: int, num_tokens: int) -> list[int] | None:
        """Make the table cover ``num_tokens`` tokens, all or nothing.

        Returns the blocks appended to the table (often none), or None where too few are free; then nothing has changed.
        """
        table = self._tables.get(request_id)
        if table is None:
            table = BlockTable()
        assert num_tokens >= table.num_tokens, f"request {request_id} covers {table.num_tokens} tokens; truncate() is what shrinks it"
        missing = -(-num_tokens // self.block_size) - len(table.block_ids)
        new: list[int] = []
        if missing > 0:
            if missing > self.pool.num_free:
                return None
            new = self.pool.allocate(missing)
            table.block_ids.extend(new)
            self._tables[request_id] = table
        table.num_tokens = num_tokens
        return new

    def release(self, request_id: int) -> None:
        """Give up the whole table, last block first; a request without one is no error."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            for block in reversed(table.block_ids):
                self.pool.release(block)

    def truncate(self, request_id: int, num_tokens: int) -> int:
        """Keep the first ``num_tokens`` tokens and give up the blocks behind them. Returns how many became free."""
        table = self._tables[request_id]
        assert 0 <= num_tokens <= table.num_tokens, f"cannot cut {table.num_tokens} tokens to {num_tokens}"
        keep = blocks_for(num_tokens, self.block_size)
        freed = 0
        while len(table.block_ids) > keep:
            freed += self.pool.release(table.block_ids.pop())
        table.num_tokens = num_tokens
        return freed

    def num_missing(self, request_id: int, num_tokens: int) -> int:
        """Blocks the table lacks to cover ``num_tokens`` tokens."""
        return max(0, blocks_for(num_tokens, self.block_size) - self.num_held(request_id))

    def num_held(self, request_id: int) -> int:
        """Blocks in the table."""
        table = self._tables.get(request_id)
        return len(table.block_ids) if table is not None else 0

    def num_tokens(self, request_id: int) -> int:
        """Tokens that the table covers."""
        table = self._tables.get(request_id)
        return table.num_tokens if table is not None else 0

    def num_owned_alone(self, request_id: int) -> int:
        """Blocks that would become free if the request gave up all: shared ones would not."""
        counts = self.pool.ref_counts
        table = self._tables.get(request_id)
        return sum(counts[block] == 1 for block in table.block_ids) if table is not None else 0

    def num_tokens_without(self, request_id: int, num_blocks: int) -> int:
        """Tokens left to the request if it gave up its tail until ``num_blocks`` blocks really became free."""
        table = self._tables.get(request_id)
        if table is None:
            return 0
        keep = len(table.block_ids)
        while keep and num_blocks > 0:
            keep -= 1
            num_blocks -= self.pool.ref_counts[table.block_ids[keep]] == 1
        return min(table.num_tokens, keep * self.block_size)

    def block_ids(self, request_id: int) -> array[int]:
        """A copy of the request's table; type code 'i'."""
        table = self._tables.get(request_id)
        return table.block_ids[:] if table is not None else array("i")

    def stats(self) -> BlockStats:
        """Counts at this moment."""
        pool, size = self.pool, self.block_size
        unused = [table.num_unused_slots(size) for table in self._tables.values()]
        used = pool.num_blocks - pool.num_free
        return BlockStats(
            total=pool.num_blocks,
            free=pool.num_free,
            cached=0,
            used=used,
            shared=pool.num_shared,
            used_slots=used * size,
            internal_slots=sum(unused),
            max_internal_slots=max(unused, default=0),
        )

    def check(self) -> None:
        """Prove that the books balance; AssertionError says where they do not.

        Every block is free or owned as often as its count says, none is twice in one table, and each table has
        exactly the blocks that its tokens need.
        """
        self.pool.check()
        owners: Counter[int] = Counter()
        for request_id, table in self._tables.items():
            blocks = set(table.block_ids)
            assert len(blocks) == len(table.block_ids), f"request {request_id} has a block twice: {list(table.block_ids)}"
            needed = blocks_for(table.num_tokens, self.block_size)
            assert len(blocks) == needed, (
                f"request {request_id} has {len(blocks)} blocks for {table.num_tokens} tokens, which need {needed}"
            )
            owners.update(blocks)
        for block, count in enumerate(self.pool.ref_counts):
            assert owners[block] == count, f"block {block} is in {owners[block]} tables and has a count of {count}"
