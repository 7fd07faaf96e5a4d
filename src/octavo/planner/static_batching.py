"""Static batching: a batch is closed once somebody does not fit or nobody waits; the next one begins when its longest has ended.

It is laid over any way to give requests their memory: what is asked of a block manager tells all that it takes. Ended requests keep their
memory, and their rows run on empty, until the batch is over; only where another one of the batch finds no room is that
memory given back before. Beam searches are not batched so: their beams come and go within a request.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from octavo.blocks import BlockManager
from octavo.planner.allocators import ContiguousManager, GrowingManager, MaximumManager, OracleManager, PowerOfTwoManager


class StaticBatching(BlockManager):
    """Comes before a block manager among the bases of a class."""

    ended: dict[int, int]
    """Requests of the batch that have ended, with the tokens that each had computed."""
    num_empty_rows: int
    """Rows that run on though their requests have ended."""
    _batch: set[int]
    """Requests of the batch that have not ended."""
    _open: bool

    def begin(self, max_rows: int, num_waiting: Callable[[], int], on_batch_end: Callable[[], None]) -> None:
        """Open the first batch, of at most ``max_rows``. ``num_waiting`` tells how many wait, ``on_batch_end`` hears of each batch's end."""
        self.ended, self.num_empty_rows, self._max_rows = {}, 0, max_rows
        self._num_waiting, self._on_batch_end = num_waiting, on_batch_end
        self._batch, self._open = set(), True

    @property
    def request_ids(self) -> set[int]:
        return super().request_ids - self.ended.keys()

    def admit(
        self,
        request_id: int,
        token_ids: array[int],
        salt: str | None = None,
        reads: bool = False,
        leaves: bool = False,
        copies: bool = True,
    ) -> int | None:
        if request_id not in self._batch:
            self._open = self._open and len(self._batch) + self.num_empty_rows < self._max_rows
            if not self._open:
                return None
        covered = super().admit(request_id, token_ids, salt, reads, leaves, copies)
        if covered is None and request_id in self._batch and self._give_back():
            covered = super().admit(request_id, token_ids, salt, reads, leaves, copies)
        if covered is None:
            self._open = False
        else:
            self._batch.add(request_id)
        return covered

    def reserve(self, request_id: int, num_tokens: int) -> list[int] | None:
        new = super().reserve(request_id, num_tokens)
        return super().reserve(request_id, num_tokens) if new is None and self._give_back() else new

    def fork(self, parent_id: int, child_id: int, token_ids: array[int]) -> None:
        super().fork(parent_id, child_id, token_ids)
        self._batch.add(child_id)

    def release(self, request_id: int, num_computed: int = 0) -> None:
        """Of a request that has ended, or that never got into a batch."""
        if request_id not in self._batch:
            super().release(request_id, num_computed)
            return
        self._batch.remove(request_id)
        self.ended[request_id] = num_computed
        self.num_empty_rows += 1
        if not self._batch:
            self._give_back()
            self.num_empty_rows, self._open = 0, True
            self._on_batch_end()

    def end_step(self, failed: bool = False) -> None:
        super().end_step(failed)
        self._open = (self._open and self._num_waiting() > 0) or not self._batch

    def _give_back(self) -> bool:
        """Release what ended requests hold. Returns whether there was any."""
        ended = self.ended
        self.ended = {}
        for request_id, num_computed in ended.items():
            super().release(request_id, num_computed)
        return bool(ended)


class StaticPaged(StaticBatching, BlockManager):
    """Blocks as they are needed, in static batches."""


class StaticMaximum(StaticBatching, MaximumManager):
    """Regions of the maximum, in static batches."""


class StaticPowerOfTwo(StaticBatching, PowerOfTwoManager):
    """Regions rounded up, in static batches."""


class StaticOracle(StaticBatching, OracleManager):
    """Regions of the right size, in static batches."""


class StaticGrowing(StaticBatching, GrowingManager):
    """Regions that are doubled, in static batches."""


STATIC_SCHEMES: dict[str, type[ContiguousManager]] = {
    "maximum": StaticMaximum,
    "power_of_two": StaticPowerOfTwo,
    "oracle": StaticOracle,
    "growing": StaticGrowing,
}
"""The contiguous schemes by name, in static batches."""
