"""Where every slot of the cache is, by kind, at one moment, on average and over time.

    used       holds a token
    reserved   kept for a token that its request will still have
    internal   kept by a request that will never use it: a block's unfilled end, a reservation too long, a static batch's ended request
    external   free, but of no use: rounded away by the placement, or in holes too small for what waits
    free       the rest; with ``cached``, what can be handed out but still holds tokens that may be found

used + reserved + internal + external + free = total, always. ``shared`` counts on top: slots that would be used
beside them if no block had two owners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.blocks import BlockManager
from octavo.planner.allocators import ContiguousManager
from octavo.planner.static_batching import StaticBatching
from octavo.request import split_id

KINDS = ("used", "reserved", "internal", "external", "free")


class Usage(NamedTuple):
    """Slots by kind; whole numbers at one moment, means over several steps."""

    total: float
    used: float
    reserved: float
    internal: float
    external: float
    free: float
    shared: float = 0
    cached: float = 0


def usage(blocks: BlockManager, final_tokens: Mapping[int, int]) -> Usage:
    """Slots by kind now. ``final_tokens`` tells how many tokens each request, or each of its samples, will have at its end."""
    if isinstance(blocks, ContiguousManager):
        return _contiguous(blocks, final_tokens)
    return _paged(blocks, final_tokens)


def _paged(blocks: BlockManager, final_tokens: Mapping[int, int]) -> Usage:
    stats, size = blocks.stats(), blocks.block_size
    reserved = 0
    if size > 1:
        for request_id in blocks.request_ids:
            num_tokens = blocks.num_tokens(request_id)
            reserved += min(-num_tokens % size, max(0, final_tokens[split_id(request_id)[0]] - num_tokens))
    reserved = min(reserved, stats.internal_slots)  # several tables may share one unfilled block
    useless = _ended_slots(blocks) if isinstance(blocks, StaticBatching) else 0
    return Usage(
        total=stats.total * size,
        used=stats.used_slots - stats.internal_slots - useless,
        reserved=reserved,
        internal=stats.internal_slots - reserved + useless,
        external=0,
        free=stats.free * size,
        shared=stats.saved * size,
        cached=stats.cached * size,
    )


def _ended_slots(blocks: StaticBatching) -> int:
    """Slots with tokens of requests that have ended, in blocks that no running one holds."""
    running = {block for request_id in blocks.request_ids for block in blocks.block_ids(request_id)}
    tokens: dict[int, int] = {}
    for request_id in blocks.ended:
        num_tokens, size = blocks.num_tokens(request_id), blocks.block_size
        for index, block in enumerate(blocks.block_ids(request_id)):
            tokens[block] = min(size, num_tokens - index * size)
    return sum(count for block, count in tokens.items() if block not in running)


def _contiguous(blocks: ContiguousManager, final_tokens: Mapping[int, int]) -> Usage:
    used = reserved = internal = rounded = 0
    ended = blocks.ended if isinstance(blocks, StaticBatching) else {}
    for request_id, region in blocks.regions().items():
        rounded += blocks.arena.rounded(region.size) - region.size
        if request_id in ended:
            internal += region.size
            continue
        will_use = max(region.num_tokens, min(region.size, final_tokens[split_id(request_id)[0]]))
        used += region.num_tokens
        reserved += will_use - region.num_tokens
        internal += region.size - will_use
    useless = blocks.arena.num_useless(blocks.refused) if blocks.refused is not None else 0
    free = blocks.arena.num_free - useless
    return Usage(blocks.arena.size, used, reserved, internal, rounded + useless, free)


@dataclass(slots=True)
class UsageMean:
    """Slots by kind, each step counting by its duration."""

    seconds: float = 0.0
    batch: float = 0.0
    """Sum of running requests times seconds."""
    sums: list[float] = field(default_factory=lambda: [0.0] * len(Usage._fields))
    max_running: int = 0

    def add(self, seconds: float, running: int, slots: Usage) -> None:
        """Count a step, or several, that take so long."""
        self.seconds += seconds
        self.batch += seconds * running
        self.max_running = max(self.max_running, running)
        self.sums = [total + seconds * count for total, count in zip(self.sums, slots, strict=True)]

    def shares(self) -> dict[str, float]:
        """Each kind as a share of all slots."""
        means = dict(zip(Usage._fields, self.sums, strict=True))
        return {kind: means[kind] / max(means["total"], 1e-300) for kind in (*KINDS, "shared", "cached")}

    @property
    def mean_running(self) -> float:
        return self.batch / self.seconds if self.seconds else 0.0

    @property
    def saved(self) -> float:
        """Memory saved by sharing: blocks saved / blocks that would be needed without it (arXiv 2309.06180, section 6.3)."""
        means = dict(zip(Usage._fields, self.sums, strict=True))
        needed = means["total"] - means["free"] - means["external"] + means["shared"]
        return means["shared"] / needed if needed > 0 else 0.0


def merged(means: Sequence[UsageMean]) -> UsageMean:
    """Means of several engines as one."""
    total = UsageMean()
    for mean in means:
        total.seconds += mean.seconds
        total.batch += mean.batch
        total.max_running = max(total.max_running, mean.max_running)
        total.sums = [a + b for a, b in zip(total.sums, mean.sums, strict=True)]
    return total
