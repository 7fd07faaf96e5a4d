"""Where every slot of the cache is, by kind, at one moment and averaged over a run.

    used       holds a token
    reserved   kept for a token that its request will still have
    internal   kept by a request that will never use it: a block's unfilled end, a reservation too long
    external   free, but of no use: rounded away by the placement, or in holes too small for what waits
    free       the rest; with ``cached``, what can be handed out but still holds tokens that may be found

used + reserved + internal + external + free = total, always. ``shared`` counts on top: slots that would be used
beside them if no block had two owners.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.blocks import BlockManager
from octavo.planner.allocators import ContiguousManager, StaticManager

KINDS = ("used", "reserved", "internal", "external", "free")


class Usage(NamedTuple):
    """Slots by kind."""

    total: int
    used: int
    reserved: int
    internal: int
    external: int
    free: int
    shared: int = 0
    cached: int = 0


def usage(blocks: BlockManager, final_tokens: Mapping[int, int]) -> Usage:
    """Slots by kind now. ``final_tokens`` tells how many tokens each request will have at its end."""
    if isinstance(blocks, ContiguousManager):
        return _contiguous(blocks, final_tokens)
    return _paged(blocks, final_tokens)


def _paged(blocks: BlockManager, final_tokens: Mapping[int, int]) -> Usage:
    stats, size = blocks.stats(), blocks.block_size
    reserved = 0
    if size > 1:
        for request_id in blocks.request_ids:
            num_tokens = blocks.num_tokens(request_id)
            reserved += min(-num_tokens % size, max(0, final_tokens[request_id] - num_tokens))
    reserved = min(reserved, stats.internal_slots)  # several tables may share one unfilled block
    return Usage(
        total=stats.total * size,
        used=stats.used_slots - stats.internal_slots,
        reserved=reserved,
        internal=stats.internal_slots - reserved,
        external=0,
        free=stats.free * size,
        shared=stats.saved * size,
        cached=stats.cached * size,
    )


def _contiguous(blocks: ContiguousManager, final_tokens: Mapping[int, int]) -> Usage:
    used = reserved = internal = rounded = 0
    ended = blocks.ended if isinstance(blocks, StaticManager) else {}
    for request_id, region in blocks.regions().items():
        rounded += blocks.arena.rounded(region.size) - region.size
        if request_id in ended:
            internal += region.size
            continue
        will_use = max(region.num_tokens, min(region.size, final_tokens[request_id]))
        used += region.num_tokens
        reserved += will_use - region.num_tokens
        internal += region.size - will_use
    useless = blocks.arena.num_useless(blocks.refused) if blocks.refused is not None else 0
    free = blocks.arena.num_free - useless
    return Usage(blocks.arena.size, used, reserved, internal, rounded + useless, free)


@dataclass(slots=True)
class UsageMean:
    """Slots by kind, each step counting by its duration; and a timeline of at most ``2 * points`` samples."""

    points: int = 128
    seconds: float = 0.0
    batch: float = 0.0
    """Sum of running requests times seconds."""
    sums: list[float] = field(default_factory=lambda: [0.0] * len(Usage._fields))
    timeline: list[tuple[float, int, Usage]] = field(default_factory=list)
    """(time, running requests, slots by kind)"""
    max_running: int = 0
    _every: int = 1
    _seen: int = 0

    def add(self, now: float, seconds: float, running: int, slots: Usage) -> None:
        """Count a step that takes so long."""
        self.seconds += seconds
        self.batch += seconds * running
        self.max_running = max(self.max_running, running)
        self.sums = [total + seconds * count for total, count in zip(self.sums, slots, strict=True)]
        if self._seen % self._every == 0:
            self.timeline.append((now, running, slots))
            if len(self.timeline) >= 2 * self.points:
                del self.timeline[1::2]
                self._every *= 2
        self._seen += 1

    def shares(self) -> dict[str, float]:
        """Each kind as a share of all slots."""
        means = dict(zip(Usage._fields, self.sums, strict=True))
        return {kind: means[kind] / max(means["total"], 1e-300) for kind in (*KINDS, "shared", "cached")}

    @property
    def mean_running(self) -> float:
        return self.batch / self.seconds if self.seconds else 0.0
