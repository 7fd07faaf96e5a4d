"""Stage 3 of 7: which blocks can be found again, by the tokens in them. Before it: ``scheduler``. After it: ``block_table``.

A tree of entries for each salt. A path from the root spells the tokens from position 0 on, a block per entry:

    root ── #1 [t0 .. tB-1] ── #4 [tB .. t2B-1] ── #5 [t2B ..     filled blocks: shared as they are
                          `─── #9 [tB .. tB+k-1]                  the unfilled end of an ended request: copied from

An entry is found by (its parent's number, its tokens, its salt), and numbers are never used again. So nothing is trusted
but equality: equal tokens after different parents, or under different salts, are different entries.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice

MAX_CHILDREN_SEARCHED = 16


class Entry:
    """A block that can be found."""

    __slots__ = ("alive", "block", "children", "number", "owner", "parent", "ready", "salt", "tokens")

    def __init__(self, number: int, parent: Entry | None, tokens: bytes, salt: str | None, block: int, owner: int, ready: bool) -> None:
        self.number = number
        self.parent = parent
        """None for the first block of a sequence."""
        self.tokens = tokens
        """The block's token ids, as the bytes of an array of type code 'i'."""
        self.salt = salt
        self.block = block
        self.owner = owner
        """The request that computes it."""
        self.ready = ready
        """Whether it has been computed; if not, it is scheduled in the step now planned or running."""
        self.alive = True
        """Whether it can be found; once False, always False."""
        self.children: dict[int, Entry] = {}
        """By number, oldest first."""


Key = tuple[int, bytes, str | None]


class PrefixIndex:
    """All entries."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Entry] = {}
        self.by_block: dict[int, Entry] = {}
        """A block has at most one entry. Read only for others."""
        self._roots: dict[str | None, dict[int, Entry]] = {}
        """First blocks by salt, as ``children`` of an entry."""
        self._promised: list[Entry] = []
        self._last_number = 0

    def __len__(self) -> int:
        return len(self.by_block)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.by_block.values())

    def get(self, parent: Entry | None, tokens: bytes, salt: str | None) -> Entry | None:
        """The entry with exactly these tokens after this parent."""
        return self._by_key.get((parent.number if parent is not None else 0, tokens, salt))

    def nearest(self, parent: Entry | None, tokens: bytes, salt: str | None) -> tuple[Entry | None, int]:
        """The computed child of ``parent`` that begins with the most of ``tokens``, and how many that are.

        Looks at the newest ``MAX_CHILDREN_SEARCHED`` children alone.
        """
        children = parent.children if parent is not None else self._roots.get(salt, {})
        best, most = None, 0
        for child in islice(reversed(children.values()), MAX_CHILDREN_SEARCHED):
            if child.ready and (common := _common(child.tokens, tokens)) > most:
                best, most = child, common
        return best, most

    def add(self, parent: Entry | None, tokens: bytes, salt: str | None, block: int, owner: int, ready: bool = False) -> Entry:
        """Make a block findable; its key must be new. If not ``ready``, it is promised: see ``settle``."""
        assert block not in self.by_block, f"block {block} can be found already"
        self._last_number += 1
        entry = Entry(self._last_number, parent, tokens, salt, block, owner, ready)
        self._by_key[_key(entry)] = self.by_block[block] = entry
        siblings = parent.children if parent is not None else self._roots.setdefault(salt, {})
        siblings[entry.number] = entry
        if not ready:
            self._promised.append(entry)
        return entry

    def withdraw(self, entry: Entry) -> list[int]:
        """Forget an entry and all that follow it, which could no longer be reached. Returns their blocks."""
        if entry.parent is not None:
            del entry.parent.children[entry.number]
        else:
            siblings = self._roots[entry.salt]
            del siblings[entry.number]
            if not siblings:
                del self._roots[entry.salt]
        blocks, stack = [], [entry]
        while stack:
            gone = stack.pop()
            gone.alive = False
            del self._by_key[_key(gone)], self.by_block[gone.block]
            blocks.append(gone.block)
            stack.extend(gone.children.values())
        return blocks

    def settle(self) -> None:
        """What was promised has been computed."""
        for entry in self._promised:
            entry.ready = True
        self._promised.clear()

    def take_promised(self) -> list[Entry]:
        """Entries promised and not computed, which will not be."""
        promised, self._promised = self._promised, []
        return promised

    def check(self, block_size: int) -> None:
        """Prove that keys, blocks and children agree; AssertionError says where they do not."""
        assert len(self._by_key) == len(self.by_block), f"{len(self._by_key)} keys lead to {len(self.by_block)} blocks"
        reached = [child for children in self._roots.values() for child in children.values()]
        assert all(self._roots.values()), "an empty root was kept"
        for entry in reached:
            reached.extend(entry.children.values())
            assert entry.alive and self.by_block.get(entry.block) is entry, f"block {entry.block} has lost its entry {entry.number}"
            assert self._by_key.get(_key(entry)) is entry, f"entry {entry.number} is not found by its key"
            assert all(child.parent is entry and child.salt == entry.salt for child in entry.children.values())
            filled = len(entry.tokens) == block_size * array("i").itemsize
            assert filled or (not entry.children and entry.ready), f"entry {entry.number} is not filled but others follow it"
        assert len(reached) == len(self.by_block), f"{len(self.by_block) - len(reached)} entries cannot be reached"


def _key(entry: Entry) -> Key:
    return entry.parent.number if entry.parent is not None else 0, entry.tokens, entry.salt


def _common(one: bytes, other: bytes) -> int:
    """How many token ids two sequences have in common at their start.

    >>> _common(array("i", [1, 2, 3]).tobytes(), array("i", [1, 2, 4, 5]).tobytes())
    2
    """
    if one[:4] != other[:4]:  # most often the first token tells them apart
        return 0
    pairs = zip(memoryview(one).cast("i"), memoryview(other).cast("i"), strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)) // array("i").itemsize)
