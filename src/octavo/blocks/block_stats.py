"""Stage 3 of 7: figures of the blocks, as values. Before it: ``scheduler``. After it: ``block_table``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class BlockStats(NamedTuple):
    """Blocks by what they are used for, and slots by kind of waste, at one moment."""

    total: int
    free: int
    """Blocks that can be handed out, with those counted in ``cached``."""
    cached: int
    """Free blocks whose tokens can still be found."""
    used: int
    shared: int
    """Used blocks with more than one owner."""
    saved: int
    """Blocks that would be used on top if nothing were shared: owners of used blocks beyond the first."""
    used_slots: int
    """Slots of the used blocks."""
    internal_slots: int
    """Of these, the ones that hold no token: the unfilled ends of last blocks."""
    max_internal_slots: int
    """The most such slots of one request; always less than a block."""


@dataclass(slots=True)
class SharingStats:
    """What sharing did since the start."""

    num_queries: int = 0
    """Times that a request looked for what is cached of its tokens: when it is admitted, and when it resumes."""
    num_hits: int = 0
    """Of these, the ones that found anything."""
    num_tokens_asked: int = 0
    """Tokens looked for."""
    num_tokens_saved: int = 0
    """Tokens found, which were not computed again."""
    num_blocks_shared: int = 0
    """Blocks found and held together with others, or again."""
    num_prefix_copies: int = 0
    """Blocks copied because their first tokens were found."""
    num_forks: int = 0
    num_fork_copies: int = 0
    """Blocks copied because a request wrote into one that it shared; at most one per fork."""
