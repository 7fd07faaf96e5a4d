"""Stage 3 of 7: blocks whose tokens can be found again. Before it: ``scheduler``. After it: ``block_table``.

Puts ``block_pool`` and ``prefix_index`` together: a block is findable from the step in which it fills until it is handed
out again, also while nobody holds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from octavo.blocks.block_pool import BlockPool
from octavo.blocks.block_table import BlockTable
from octavo.blocks.prefix_index import Entry, PrefixIndex


@dataclass(slots=True)
class Match:
    """What was found of a request's tokens behind those that its table covers."""

    entries: list[Entry] = field(default_factory=list)
    """Filled blocks to share."""
    source: Entry | None = None
    """A block to copy for its first ``num_copied`` tokens."""
    num_copied: int = 0


class PrefixCache:
    """Hands blocks out and takes them back, and knows what is in them."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.index = PrefixIndex()
        self.num_cached = 0
        """Free blocks that can be found."""
        self.num_evictions = 0
        self._block_size = block_size

    def allocate(self, count: int) -> list[int]:
        """Take free blocks; what was to be found in them, and behind them, is lost."""
        taken = self.pool.allocate(count)
        if self.index:
            found = [entry for block in taken if (entry := self.index.by_block.get(block)) is not None]
            self.num_cached -= len(found)
            self.num_evictions += sum(self.forget(entry) for entry in found if entry.alive)
        return taken

    def num_plain(self, most: int, kept: Collection[int]) -> int:
        """How many free blocks, at most ``most``, can be taken in turn and lose nothing but what is found in themselves.

        A block that others are found behind would take them along, and change the order of the rest; so would one whose
        entry has a number in ``kept``.
        """
        if most <= self.pool.num_free - self.num_cached:
            return most
        lost: Counter[int] = Counter()
        for count, block in enumerate(self.pool.free_blocks(most)):
            entry = self.index.by_block.get(block)
            if entry is None:
                continue
            if entry.number in kept or len(entry.children) > lost[entry.number]:
                return count
            if entry.parent is not None:
                lost[entry.parent.number] += 1
        return min(most, self.pool.num_free)

    def share(self, block: int) -> None:
        """Count one more owner of a block that can be found."""
        self.num_cached -= self.pool.ref_counts[block] == 0
        self.pool.share(block)

    def release(self, block: int) -> bool:
        """Count one owner less. Returns whether the block became free."""
        findable = block in self.index.by_block
        freed = self.pool.release(block, findable)
        self.num_cached += freed and findable
        return freed

    def find(self, request_id: int, table: BlockTable) -> Match:
        """Look for the request's tokens behind those that its table covers, but the last."""
        match, size, last = Match(), self._block_size, len(table.token_ids) - 1
        if table.num_tokens % size or table.num_tokens >= last:
            return match
        self.index_filled(request_id, table)
        parent = table.entries[-1] if table.entries else None
        start = table.num_tokens
        while start + size <= last:
            entry = self.index.get(parent, table.token_ids[start : start + size].tobytes(), table.salt)
            if entry is None:
                break
            match.entries.append(entry)
            parent, start = entry, start + size
        rest = table.token_ids[start : min(last, start + size)]
        match.source, match.num_copied = self.index.nearest(parent, rest.tobytes(), table.salt)
        return match

    def index_filled(self, request_id: int, table: BlockTable) -> None:
        """Make the blocks filled since the last time findable; all of them anew where one before them has been lost.

        A block that is filled with drafts is not: only once they are accepted are they among the request's tokens.
        """
        entries, size = table.entries, self._block_size
        if entries and not entries[-1].alive:
            entries.clear()
        for position in range(len(entries), table.num_filled(size)):
            parent, tokens = entries[-1] if entries else None, table.tokens_of_block(position, size)
            entry = self.index.get(parent, tokens, table.salt)
            entries.append(entry or self.index.add(parent, tokens, table.salt, table.block_ids[position], request_id))

    def leave_end(self, request_id: int, table: BlockTable) -> None:
        """Make the partly filled last block findable, if nobody else will go on writing into it."""
        filled, used = divmod(table.num_tokens, self._block_size)
        if filled > len(table.entries):  # by drafts that were accepted with its last tokens
            self.index_filled(request_id, table)
        if not used or self.pool.ref_counts[table.block_ids[-1]] > 1 or table.block_ids[-1] in self.index.by_block:
            return
        self.index_filled(request_id, table)
        parent = table.entries[-1] if filled else None
        tokens = table.tokens_of_block(filled, self._block_size)
        if self.index.get(parent, tokens, table.salt) is None:
            self.index.add(parent, tokens, table.salt, table.block_ids[-1], request_id, ready=True)

    def withdraw_promised(self, request_id: int, entries: Sequence[Entry]) -> None:
        """Take back what this request will not compute."""
        for entry in entries:
            if not entry.ready and entry.alive and entry.owner == request_id:
                self.forget(entry)

    def forget(self, entry: Entry) -> int:
        """Withdraw an entry and those behind it. Returns how many; free blocks among them are now handed out first."""
        blocks = self.index.withdraw(entry)
        for block in blocks:
            if self.pool.ref_counts[block] == 0:
                self.num_cached -= 1
                self.pool.share(block)
                self.pool.release(block)
        return len(blocks)

    def end_step(self, failed: bool) -> None:
        """What was promised in this step has been computed; if it ``failed``, it is taken back."""
        if failed:
            for entry in self.index.take_promised():
                if entry.alive:
                    self.forget(entry)
        self.index.settle()

    def reset(self) -> None:
        """Forget everything."""
        for entry in list(self.index):
            if entry.alive:
                self.forget(entry)

    def check(self) -> None:
        """Prove that the books balance; AssertionError says where they do not."""
        self.pool.check()
        self.index.check(self._block_size)
        cached = sum(self.pool.ref_counts[entry.block] == 0 for entry in self.index)
        assert cached == self.num_cached, f"{cached} free blocks can be found, but {self.num_cached} were counted"

    def check_table(self, request_id: int, table: BlockTable) -> None:
        """Prove that a table's blocks are found, if at all, by the tokens that the request has there, or by more of them."""
        entry = None
        for position, block in enumerate(table.block_ids):
            found = self.index.by_block.get(block)
            if table.token_ids and (position == 0 or entry is not None):
                tokens = table.tokens_of_block(position, self._block_size)
                if found is not None and found.parent is entry and found.tokens[: len(tokens)] == tokens and found.salt == table.salt:
                    entry = found
                    continue
                entry = self.index.get(entry, tokens, table.salt)
            assert found is None, f"block {block} of request {request_id} is found by other tokens than it holds"
