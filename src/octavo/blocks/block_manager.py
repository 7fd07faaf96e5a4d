"""Stage 3 of 7: gives requests their blocks. Before it: ``scheduler``. After it: ``block_table``.

The scheduler speaks of tokens, the pool of blocks; the manager turns one into the other and owns every table.
Blocks are given as a request needs them, so only the last one of a table is ever partly filled. Tables share blocks
in two ways:

    fork     child  = the parent's blocks, all of them; the first to write into the partly filled last one copies it
    prefix   tokens   [ filled blocks found: shared ][ begins like a findable block: copied ][ to be computed
             found    0 ................................................................... at most all but the last

A copy is done before the step's forward pass; its source stays pinned (one more reference) until the step has ended.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from octavo.blocks.block_pool import BlockPool
from octavo.blocks.block_stats import BlockStats, SharingStats
from octavo.blocks.block_table import BlockTable, blocks_for
from octavo.blocks.prefix_cache import Match, PrefixCache


class BlockManager:
    """All blocks and all block tables. Requests are known by their id alone."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True, block_bytes: int = 0) -> None:
        """``block_bytes`` is the memory of one block in all layers, for the figures alone."""
        blocks_for(0, block_size)
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks)
        self._cache = PrefixCache(self.pool, block_size)
        self._findable = self._cache.index.by_block
        self.sharing = SharingStats()
        self.copies: dict[int, int] = {}
        """Blocks to copy in the step now planned or running: {target: source}."""
        self._tables: dict[int, BlockTable] = {}
        self._pins: Counter[int] = Counter()
        """References that keep sources of copies from being handed out."""

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return self.pool.num_free

    @property
    def num_cached(self) -> int:
        """Of these, the ones whose tokens can still be found."""
        return self._cache.num_cached

    @property
    def num_findable(self) -> int:
        """Blocks, free or not, whose tokens can be found."""
        return len(self._cache.index)

    @property
    def num_evictions(self) -> int:
        """Findable blocks lost because they were handed out, or because one before them was."""
        return self._cache.num_evictions

    @property
    def request_ids(self) -> set[int]:
        """Requests that have a table."""
        return set(self._tables)

    # ---------------------------------------------------------------- a request's table

    def admit(
        self,
        request_id: int,
        token_ids: array[int],
        salt: str | None = None,
        reads: bool = False,
        leaves: bool = False,
        copies: bool = True,
    ) -> int | None:
        """Begin, or resume: hold what is cached of ``token_ids``, if then there is room for all of them.

        Returns how many tokens the table covers now: at most all but the last. None where they do not fit; then
        nothing has changed. With ``reads`` the cache is looked at, with ``leaves`` this request's blocks get into it,
        both among requests of the same salt. ``token_ids`` may grow; the manager reads it when a block fills. Without
        ``copies`` filled blocks alone are held, so that no other takes more than the request's tokens need.
        """
        table = self._tables.get(request_id)
        if table is None:
            if self.pool.num_free == 0:
                return None
            table = BlockTable(token_ids, salt, leaves and self.prefix_caching)
        reads = reads and table.caching
        match = self._cache.find(request_id, table) if reads else Match()
        if not copies or self._num_needed(table, match) > self.pool.num_free:
            match.source, match.num_copied = None, 0
            if self._num_needed(table, match) > self.pool.num_free:
                return None
        if reads:
            self._count(table, match)
        self._tables[request_id] = table
        self._adopt(table, match)
        return table.num_tokens

    def reserve(self, request_id: int, num_tokens: int) -> list[int] | None:
        """Make the table cover ``num_tokens`` tokens, all or nothing.

        Returns the blocks appended to the table (often none), or None where too few are free; then nothing has changed.
        Where the last block of the table is partly filled and shared, the first one returned replaces it and is named
        in ``copies``. Tokens beyond those known are drafts: what they fill cannot be found, and ``truncate`` takes back what
        they leave unused.
        """
        table = self._tables.get(request_id)
        if table is None:
            table = BlockTable()
        size, blocks = self.block_size, table.block_ids
        assert num_tokens >= table.num_tokens, f"request {request_id} covers {table.num_tokens} tokens; truncate() is what shrinks it"
        missing = -(-num_tokens // size) - len(blocks)
        last = blocks[-1] if table.num_tokens % size > 0 and num_tokens > table.num_tokens else -1
        copied = last >= 0 and self.pool.ref_counts[last] > 1 and self._must_copy(table)
        new: list[int] = []
        if missing + copied > 0:
            if missing + copied > self.pool.num_free:
                return None
            new = self._cache.allocate(missing + copied)
            if copied:
                self._copy_last(table, new[0])
            blocks.extend(new[1:] if copied else new)
            self._tables[request_id] = table
        if last in self._findable and not copied:
            self._cache.forget(self._findable[last])  # what is found in it is written over
        table.num_tokens = num_tokens
        if table.caching and num_tokens // size > len(table.entries):
            self._cache.index_filled(request_id, table)
        return new

    def fork(self, parent_id: int, child_id: int, token_ids: array[int]) -> None:
        """Give ``child_id`` a table of all of the parent's blocks, shared. ``token_ids`` are the child's own, as in ``admit``."""
        assert child_id not in self._tables, f"request {child_id} has a table already"
        child = self._tables[child_id] = self._tables[parent_id].fork(token_ids)
        for block in child.block_ids:
            self.pool.share(block)
        self.sharing.num_forks += 1

    def release(self, request_id: int, num_computed: int = 0) -> None:
        """Give up the whole table, last block first; a request without one is no error.

        What can be found stays findable; if all tokens that the table covers have been computed, so does its unfilled end.
        """
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        self._cache.withdraw_promised(request_id, table.entries)
        if table.caching and num_computed == table.num_tokens:
            self._cache.leave_end(request_id, table)
        for block in reversed(table.block_ids):
            self._cache.release(block)

    def truncate(self, request_id: int, num_tokens: int) -> int:
        """Keep the first ``num_tokens`` tokens and give up the blocks behind them. Returns how many became free."""
        table = self._tables[request_id]
        assert 0 <= num_tokens <= table.num_tokens, f"cannot cut {table.num_tokens} tokens to {num_tokens}"
        keep, filled = blocks_for(num_tokens, self.block_size), num_tokens // self.block_size
        self._cache.withdraw_promised(request_id, table.entries[filled:])
        del table.entries[filled:]
        freed = 0
        while len(table.block_ids) > keep:
            freed += self._cache.release(table.block_ids.pop())
        table.num_tokens = num_tokens
        return freed

    def end_step(self, failed: bool = False) -> None:
        """The step's copies are done and what it promised has been computed; or it ``failed``, and nothing is known to have been."""
        self._cache.end_step(failed)
        self.copies = {}
        if self._pins:
            pinned, self._pins = self._pins, Counter()
            for block in pinned.elements():
                self._cache.release(block)

    def reset_prefix_cache(self) -> None:
        """Forget all that can be found. Requests that hold blocks now leave nothing behind either."""
        self._cache.reset()
        for table in self._tables.values():
            table.caching = False
            table.entries.clear()

    # ---------------------------------------------------------------- figures of one request

    def num_missing(self, request_id: int, num_tokens: int) -> int:
        """Free blocks that it takes to cover ``num_tokens`` tokens, with the copy of a shared last block."""
        table = self._tables.get(request_id)
        if table is None:
            return blocks_for(num_tokens, self.block_size)
        more = num_tokens > table.num_tokens
        return max(0, blocks_for(num_tokens, self.block_size) - len(table.block_ids)) + (more and self._must_copy(table))

    def num_plain(self, most: int) -> int:
        """How many free blocks, at most ``most``, can be handed out to the present tables with the same result in any order."""
        kept = {table.entries[-1].number for table in self._tables.values() if table.entries}
        return self._cache.num_plain(most, kept)

    def num_room(self, request_id: int) -> int:
        """Most tokens by which the table can grow now."""
        table = self._tables[request_id]
        free = self.pool.num_free - self._must_copy(table)
        return (len(table.block_ids) + free) * self.block_size - table.num_tokens if free >= 0 else 0

    def num_held(self, request_id: int) -> int:
        """Blocks in the table."""
        table = self._tables.get(request_id)
        return len(table.block_ids) if table is not None else 0

    def num_tokens(self, request_id: int) -> int:
        """Tokens that the table covers."""
        table = self._tables.get(request_id)
        return table.num_tokens if table is not None else 0

    def owns_any_alone(self, request_ids: Sequence[int]) -> bool:
        """Whether any block would become free if these requests gave up all."""
        if len(request_ids) == 1:
            counts, table = self.pool.ref_counts, self._tables.get(request_ids[0])
            return table is not None and any(counts[block] == 1 for block in reversed(table.block_ids))
        return any(self._num_freed(tables, column) for tables, column in self._columns(request_ids))

    def num_missing_together(self, ends: Mapping[int, int]) -> int:
        """Free blocks that it takes to let each table of ``ends`` cover so many tokens, all in one step.

        Of those that share a partly filled last block all but one copy it, or all if it is in another table too.
        """
        missing, writers = 0, Counter[int]()
        for request_id, num_tokens in ends.items():
            table = self._tables[request_id]
            missing += max(0, blocks_for(num_tokens, self.block_size) - len(table.block_ids))
            if num_tokens > table.num_tokens and table.num_tokens % self.block_size:
                writers[table.block_ids[-1]] += 1
        owners, pins = self.pool.ref_counts, self._pins
        return missing + sum(count - (owners[block] - pins[block] == count) for block, count in writers.items())

    def num_tokens_without(self, request_ids: Sequence[int], num_blocks: int) -> int:
        """Tokens left to each of these requests, at most, if all gave up their tails until ``num_blocks`` blocks really became free.

        All are cut at the same length, so that what they share is given up by all.
        """
        for tables, column in self._columns(request_ids):
            if num_blocks <= 0:
                return (column + 1) * self.block_size
            num_blocks -= self._num_freed(tables, column)
        return 0

    def _columns(self, request_ids: Sequence[int]) -> Iterator[tuple[list[BlockTable], int]]:
        """The tables of these requests with each index into them, last one first."""
        tables = [table for request_id in request_ids if (table := self._tables.get(request_id)) is not None]
        longest = max((len(table.block_ids) for table in tables), default=0)
        return ((tables, column) for column in range(longest - 1, -1, -1))

    def _num_freed(self, tables: list[BlockTable], column: int) -> int:
        """Blocks at one index that nobody but these tables holds."""
        owners = Counter(table.block_ids[column] for table in tables if len(table.block_ids) > column)
        return sum(self.pool.ref_counts[block] == count for block, count in owners.items())

    def block_ids(self, request_id: int) -> array[int]:
        """A copy of the request's table; type code 'i'."""
        table = self._tables.get(request_id)
        return table.block_ids[:] if table is not None else array("i")

    # ---------------------------------------------------------------- figures of all, and proof

    def stats(self) -> BlockStats:
        """Counts at this moment."""
        pool, size, tables = self.pool, self.block_size, self._tables.values()
        unused = {table.block_ids[-1]: table.num_unused_slots(size) for table in tables if table.block_ids}
        used = pool.num_blocks - pool.num_free
        return BlockStats(
            total=pool.num_blocks,
            free=pool.num_free,
            cached=self._cache.num_cached,
            used=used,
            shared=pool.num_shared,
            saved=self._num_saved(used) if pool.num_shared or self._pins else 0,
            used_slots=used * size,
            internal_slots=sum(unused.values()),
            max_internal_slots=max(unused.values(), default=0),
        )

    def _num_saved(self, used: int) -> int:
        only_pinned = sum(self.pool.ref_counts[block] == pins for block, pins in self._pins.items())
        return sum(len(table.block_ids) for table in self._tables.values()) - (used - only_pinned)

    def check(self) -> None:
        """Prove that the books balance; AssertionError says where they do not.

        Every block is free or owned as often as its count says, none is twice in one table, each table has exactly the
        blocks that its tokens need, and what can be found is what its key says.
        """
        self._cache.check()
        owners = self._pins.copy()
        for request_id, table in self._tables.items():
            blocks = set(table.block_ids)
            assert len(blocks) == len(table.block_ids), f"request {request_id} has a block twice: {list(table.block_ids)}"
            needed = blocks_for(table.num_tokens, self.block_size)
            assert len(blocks) == needed, (
                f"request {request_id} has {len(blocks)} blocks for {table.num_tokens} tokens, which need {needed}"
            )
            owners.update(blocks)
            self._cache.check_table(request_id, table)
        for block, count in enumerate(self.pool.ref_counts):
            assert owners[block] == count, f"block {block} is in {owners[block]} tables and has a count of {count}"

    # ---------------------------------------------------------------- what is found, what is copied

    def _adopt(self, table: BlockTable, match: Match) -> None:
        """Hold what was found."""
        for entry in match.entries:
            self._cache.share(entry.block)
            table.block_ids.append(entry.block)
        table.entries += match.entries
        table.num_tokens += len(match.entries) * self.block_size
        if match.source is not None:
            self._cache.share(match.source.block)
            self._pins[match.source.block] += 1
            [target] = self._cache.allocate(1)
            self.copies[target] = match.source.block
            table.block_ids.append(target)
            table.num_tokens += match.num_copied

    def _count(self, table: BlockTable, match: Match) -> None:
        asked, counts = len(table.token_ids) - 1 - table.num_tokens, self.sharing
        found = len(match.entries) * self.block_size + match.num_copied
        if asked > 0:
            counts.num_queries += 1
            counts.num_hits += found > 0
            counts.num_tokens_asked += asked
            counts.num_tokens_saved += found
            counts.num_blocks_shared += len(match.entries)
            counts.num_prefix_copies += match.source is not None

    def _num_needed(self, table: BlockTable, match: Match) -> int:
        """Free blocks that it takes to cover all known tokens once ``match`` is held; what is found in free blocks takes them too."""
        counts = self.pool.ref_counts
        needed = blocks_for(len(table.token_ids), self.block_size) - len(table.block_ids)
        needed -= sum(counts[entry.block] > 0 for entry in match.entries)
        if match.source is not None and counts[match.source.block] == 0:
            needed += 1  # pinned
        return needed + self._must_copy(table)

    def _must_copy(self, table: BlockTable) -> bool:
        """Whether the next token would be written into a block that others hold too; pins do not count."""
        if table.num_tokens % self.block_size == 0:
            return False
        last = table.block_ids[-1]
        return self.pool.ref_counts[last] - self._pins[last] > 1

    def _copy_last(self, table: BlockTable, target: int) -> None:
        """Put ``target`` in the place of the shared last block; the request's own reference becomes the pin."""
        source = table.block_ids[-1]
        self._pins[source] += 1
        self.copies[target] = source
        table.block_ids[-1] = target
        self.sharing.num_fork_copies += 1
