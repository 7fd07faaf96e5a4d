"""Stage 4 of 7: a request's block table. Before it: ``block_manager``. After it: ``kernels`` (paged attention).

    position   0 ........ B-1 | B ....... 2B-1 | 2B ...  num_tokens-1 |
    table      block_ids[0]   | block_ids[1]   | block_ids[2]   ^ unused slots, fewer than B

The slot of a position is ``block_ids[position // block_size] * block_size + position % block_size``.
"""

from __future__ import annotations

from array import array


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

    __slots__ = ("block_ids", "num_tokens")

    def __init__(self) -> None:
        self.block_ids: array[int] = array("i")
        """Type code 'i'."""
        self.num_tokens = 0
        """Tokens covered: computed, or scheduled in the step now running."""

    def num_unused_slots(self, block_size: int) -> int:
        """Slots of its blocks that hold no token; fewer than ``block_size``."""
        return len(self.block_ids) * block_size - self.num_tokens
