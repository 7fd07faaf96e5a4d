"""The baselines: each request's keys and values in one contiguous region, behind the interface of the block manager.

So the engine's own scheduler drives them. A block is one slot here, and a table is the region's first slot. All regions lie in
one arena, so that free slots may be too scattered to be of use:

    arena   [ request 4 ..... | hole | request 7 ....... | hole      ]
              tokens reserved          tokens reserved
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from octavo.blocks import BlockManager, BlockStats
from octavo.errors import ConfigError
from octavo.request import split_id

Placement = Literal["first_fit", "buddy"]


class Arena:
    """Slots 0 .. size - 1, taken in contiguous regions."""

    def __init__(self, size: int, placement: Placement = "first_fit") -> None:
        if size < 1:
            raise ConfigError(f"an arena needs at least 1 slot, not {size}")
        self.size = size
        self.placement = placement
        self.num_free = size
        self._starts = [0]
        self._ends = [size]

    def rounded(self, size: int) -> int:
        """Slots that a region of ``size`` takes: with buddies the next power of two."""
        return power_of_two(size) if self.placement == "buddy" else size

    def find(self, size: int) -> int | None:
        """The lowest start where ``size`` slots fit, or None. With buddies it is a multiple of the rounded size."""
        size = self.rounded(size)
        for start, end in zip(self._starts, self._ends, strict=True):
            start = -(-start // size) * size if self.placement == "buddy" else start
            if start + size <= end:
                return start
        return None

    def take(self, start: int, size: int) -> None:
        """Take a region that ``find`` found."""
        size = self.rounded(size)
        index = bisect_left(self._starts, start + 1) - 1
        assert index >= 0 and start + size <= self._ends[index], f"slots {start} to {start + size} are not free"
        first, last = self._starts.pop(index), self._ends.pop(index)
        for begin, end in ((start + size, last), (first, start)):
            if begin < end:
                self._starts.insert(index, begin)
                self._ends.insert(index, end)
        self.num_free -= size

    def give(self, start: int, size: int) -> None:
        """Give a region back; it grows together with the holes beside it."""
        size = self.rounded(size)
        end, index = start + size, bisect_left(self._starts, start)
        assert index == len(self._starts) or end <= self._starts[index], f"slots {start} to {end} are free already"
        assert index == 0 or self._ends[index - 1] <= start, f"slots {start} to {end} are free already"
        if index < len(self._starts) and self._starts[index] == end:
            end = self._ends[index]
            del self._starts[index], self._ends[index]
        if index and self._ends[index - 1] == start:
            self._ends[index - 1] = end
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
        self.num_free += size

    def num_useless(self, size: int) -> int:
        """Free slots in which no region of ``size`` can lie."""
        rounded, useless = self.rounded(size), 0
        for start, end in zip(self._starts, self._ends, strict=True):
            first = -(-start // rounded) * rounded if self.placement == "buddy" else start
            useless += 0 if first + rounded <= end else end - start
        return useless

    def largest(self) -> int:
        """Slots of the largest hole."""
        return max((end - start for start, end in zip(self._starts, self._ends, strict=True)), default=0)


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below ``size``.

    >>> [power_of_two(n) for n in (1, 2, 3, 16, 17)]
    [1, 2, 4, 16, 32]
    """
    return 1 << max(0, size - 1).bit_length()


@dataclass(slots=True)
class Region:
    """The slots of one request."""

    start: int
    size: int
    num_tokens: int = 0


class ContiguousManager(BlockManager):
    """One region per request. Subclasses say how large it is at first, and whether it may grow.

    ``final_tokens`` tells how many tokens a request will have at its end, by its id: what an oracle knows.
    """

    def __init__(self, num_slots: int, max_model_len: int, final_tokens: Mapping[int, int], placement: Placement = "first_fit") -> None:
        super().__init__(1, 1, prefix_caching=False)  # its pool is not used
        self.arena = Arena(num_slots, placement)
        self.max_model_len = max_model_len
        self.num_copied = 0
        """Slots copied in the step now planned."""
        self.num_slots_copied = 0
        """The same since the start."""
        self.num_stalls = 0
        """Times that a region had to grow and could not."""
        self.refused: int | None = None
        """Slots of the smallest region asked for in this step and not given."""
        self._final = final_tokens
        self._regions: dict[int, Region] = {}

    def first_size(self, request_id: int, num_tokens: int) -> int:
        """Slots to reserve for a request of ``num_tokens`` known tokens."""
        raise NotImplementedError

    def final(self, request_id: int) -> int:
        """Tokens that a request, or a sample of one, will have at its end."""
        return self._final[split_id(request_id)[0]]

    # ---------------------------------------------------------------- what the scheduler asks

    @property
    def num_blocks(self) -> int:
        return self.arena.size

    @property
    def num_free(self) -> int:
        return self.arena.num_free

    @property
    def request_ids(self) -> set[int]:
        return set(self._regions)

    def admit(
        self,
        request_id: int,
        token_ids: array[int],
        salt: str | None = None,
        reads: bool = False,
        leaves: bool = False,
        copies: bool = True,
    ) -> int | None:
        """Place a region for all known tokens, or keep the one there is. Returns how many tokens it covers already.

        Where a larger one is needed and cannot be placed beside the old one, the old one is given up with what it
        holds, if that makes the room.
        """
        region, num_tokens = self._regions.get(request_id), len(token_ids)
        if region is not None and region.size >= num_tokens:
            return region.num_tokens
        size = self.first_size(request_id, num_tokens)
        if region is not None:
            self.arena.give(region.start, region.size)
        start = self.arena.find(size)
        if start is None:
            if region is not None:
                self.arena.take(region.start, region.size)
            self._refuse(size)
            return None
        self.arena.take(start, size)
        self._regions[request_id] = Region(start, size)
        return 0

    def reserve(self, request_id: int, num_tokens: int) -> list[int] | None:
        region = self._regions[request_id]
        if num_tokens > region.size and not self._grow(region, num_tokens):
            return None
        region.num_tokens = num_tokens
        return []

    def release(self, request_id: int, num_computed: int = 0) -> None:
        self._drop(request_id)

    def _drop(self, request_id: int) -> None:
        region = self._regions.pop(request_id, None)
        if region is not None:
            self.arena.give(region.start, region.size)

    def truncate(self, request_id: int, num_tokens: int) -> int:
        """A region is given up whole or not at all."""
        region = self._regions[request_id]
        if num_tokens:
            region.num_tokens = num_tokens
            return 0
        self._drop(request_id)
        return region.size

    def end_step(self, failed: bool = False) -> None:
        self.num_copied, self.refused = 0, None

    def num_missing(self, request_id: int, num_tokens: int) -> int:
        """0 where there is room for so many tokens, else more than what is free."""
        region = self._regions.get(request_id)
        if region is not None and region.size >= num_tokens:
            return 0
        size = self._grown(region, num_tokens) if region is not None else self.first_size(request_id, num_tokens)
        return 0 if self.arena.find(size) is not None else self.arena.num_free + max(1, size - self.arena.largest())

    def num_room(self, request_id: int) -> int:
        region = self._regions[request_id]
        return region.size - region.num_tokens

    def num_held(self, request_id: int) -> int:
        region = self._regions.get(request_id)
        return region.size if region is not None else 0

    def num_tokens(self, request_id: int) -> int:
        region = self._regions.get(request_id)
        return region.num_tokens if region is not None else 0

    def owns_any_alone(self, request_ids: Sequence[int]) -> bool:
        return any(request_id in self._regions for request_id in request_ids)

    def num_tokens_without(self, request_ids: Sequence[int], num_blocks: int) -> int:
        return 0

    def block_ids(self, request_id: int) -> array[int]:
        region = self._regions.get(request_id)
        return array("i", [region.start] if region is not None else [])

    # ---------------------------------------------------------------- figures, and proof

    def stats(self) -> BlockStats:
        taken = self.arena.size - self.arena.num_free
        unused = [region.size - region.num_tokens for region in self._regions.values()]
        return BlockStats(
            total=self.arena.size,
            free=self.arena.num_free,
            cached=0,
            used=taken,
            shared=0,
            saved=0,
            used_slots=taken,
            internal_slots=sum(unused),
            max_internal_slots=max(unused, default=0),
        )

    def regions(self) -> Mapping[int, Region]:
        """All regions by request, to read."""
        return self._regions

    def check(self) -> None:
        """No two regions overlap, and holes and regions make up the arena."""
        placed = sorted((r.start, r.start + self.arena.rounded(r.size)) for r in self._regions.values())
        for (_, end), (start, _) in pairwise(placed):
            assert end <= start, f"two regions overlap at slot {start}"
        taken = sum(end - start for start, end in placed)
        assert taken + self.arena.num_free == self.arena.size, f"{taken} taken and {self.arena.num_free} free of {self.arena.size} slots"
        assert all(r.num_tokens <= r.size for r in self._regions.values()), "a region holds more tokens than slots"

    # ---------------------------------------------------------------- growing

    def _grown(self, region: Region, num_tokens: int) -> int:
        return min(max(2 * region.size, power_of_two(num_tokens)), max(num_tokens, self.max_model_len))

    def _grow(self, region: Region, num_tokens: int) -> bool:
        """Move a region to where twice its slots are free; both are taken while it is copied."""
        size = self._grown(region, num_tokens)
        start = self.arena.find(size)
        if start is None:
            self.num_stalls += 1
            self._refuse(size)
            return False
        self.arena.take(start, size)
        self.arena.give(region.start, region.size)
        region.start, region.size = start, size
        self.num_copied += region.num_tokens
        self.num_slots_copied += region.num_tokens
        return True

    def _refuse(self, size: int) -> None:
        self.refused = size if self.refused is None else min(self.refused, size)


class MaximumManager(ContiguousManager):
    """A region of ``max_model_len`` for each request."""

    def first_size(self, request_id: int, num_tokens: int) -> int:
        return self.max_model_len


class PowerOfTwoManager(ContiguousManager):
    """Room for the prompt and for the output rounded up to a power of two: right to within a factor of two."""

    def first_size(self, request_id: int, num_tokens: int) -> int:
        return min(self.max_model_len, num_tokens + power_of_two(max(1, self.final(request_id) - num_tokens)))


class OracleManager(ContiguousManager):
    """Exactly the slots that a request will have used at its end."""

    def first_size(self, request_id: int, num_tokens: int) -> int:
        return max(num_tokens, self.final(request_id))


class GrowingManager(ContiguousManager):
    """Room for what is known, rounded up to a power of two; doubled and copied when full."""

    def first_size(self, request_id: int, num_tokens: int) -> int:
        return min(max(16, power_of_two(num_tokens)), max(num_tokens, self.max_model_len))


SCHEMES: dict[str, type[ContiguousManager]] = {
    "maximum": MaximumManager,
    "power_of_two": PowerOfTwoManager,
    "oracle": OracleManager,
    "growing": GrowingManager,
}
"""The contiguous schemes by name; ``paged`` is the block manager itself."""
