"""Stage 4 of 7: a request's block table. Before it: ``block_manager``. After it: ``kernels`` (paged attention).

    position   0 ........ B-1 | B ....... 2B-1 | 2B ...  num_tokens-1 |
    table      block_ids[0]   | block_ids[1]   | block_ids[2]   ^ unused slots, fewer than B

The slot of a position is ``block_ids[position // block_size] * block_size + position % block_size``.
"""

from __future__ import annotations

from array import array

from octavo.blocks.prefix_index import Entry


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens: the quotient, rounded up.

    >>> [blocks_for(n, 16) for n in (0, 32, 50, 17, 80)]
    [0, 2, 4, 2, 5]
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    if num_tokens < 0:
        raise ValueError(f"a number of tokens cannot be negative, as {num_tokens} is")
    return -(-num_tokens // block_size)


class BlockTable:
    """The blocks of one request in the order of its tokens, and how many tokens they cover."""

    __slots__ = ("block_ids", "caching", "entries", "num_tokens", "salt", "token_ids")

    def __init__(self, token_ids: array[int] | None = None, salt: str | None = None, caching: bool = False) -> None:
        self.block_ids: array[int] = array("i")
        """Type code 'i'."""
        self.num_tokens = 0
        """Tokens covered: computed, or scheduled in the step now running, with its drafts."""
        self.token_ids: array[int] = token_ids if token_ids is not None else array("i")
        """The request's own array of tokens known, which grows; read when a block fills."""
        self.caching = caching
        """Whether its filled blocks can be found by others."""
        self.salt = salt
        self.entries: list[Entry] = []
        """What its filled blocks are found by, from the first on; another block of equal content may stand for one of them."""

    def num_filled(self, block_size: int) -> int:
        """Blocks filled with tokens that are known: those with drafts do not count."""
        return min(self.num_tokens, len(self.token_ids)) // block_size

    def num_unused_slots(self, block_size: int) -> int:
        """Slots of its blocks that hold no token; fewer than ``block_size``."""
        return len(self.block_ids) * block_size - self.num_tokens

    def tokens_of_block(self, position: int, block_size: int) -> bytes:
        """The tokens covered in the block at this position of the table, as bytes of type code 'i'."""
        start = position * block_size
        return self.token_ids[start : min(start + block_size, self.num_tokens)].tobytes()

    def fork(self, token_ids: array[int]) -> BlockTable:
        """A table of the same blocks, for a request that goes on with its own ``token_ids``."""
        child = BlockTable(token_ids, self.salt, self.caching)
        child.block_ids, child.num_tokens, child.entries = self.block_ids[:], self.num_tokens, self.entries[:]
        return child
