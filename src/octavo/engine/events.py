"""What happens to requests, as frozen events: kept in a bounded log and handed to subscribers.

Times are seconds of the engine's clock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.request import FinishReason, RequestMetrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """Anything that happened to one request."""

    time: float
    request_id: int
    sample_index: int = field(default=0, kw_only=True)
    """Which of the request's samples; 0 where it is about the whole request."""


@dataclass(frozen=True, slots=True)
class Arrived(Event):
    """A request passed its checks and was queued."""

    prompt_len: int
    max_tokens: int
    priority: int
    num_samples: int = 1


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """A request, or a sample that has forked, began to run, or ran on after a preemption."""

    resumed: bool
    num_computed: int
    """Tokens that did not have to be computed: found in the cache, kept, or shared by a fork."""
    num_blocks: int
    """Blocks it began with."""


@dataclass(frozen=True, slots=True)
class FirstToken(Event):
    """The first output token of any sample was chosen."""


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """A request gave up blocks so that another could go on."""

    by: int
    """The request that needed them; itself where nobody ranked behind it."""
    num_needed: int
    """Blocks that were missing."""
    num_given: int
    """Blocks given up."""
    num_lost: int
    """Computed tokens that must be computed again."""
    was_running: bool
    """False where it had stopped before and now lost more of the blocks it had kept."""


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """A sample of a request ended."""

    reason: FinishReason
    stop_reason: int | str | None
    metrics: RequestMetrics


Subscriber = Callable[[Event], None]


class EventLog:
    """The last ``capacity`` events, and callables that hear of each as it happens, on the engine's thread."""

    def __init__(self, capacity: int = 4096) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._subscribers: list[Subscriber] = []

    def __len__(self) -> int:
        return len(self._events)

    def recent(self) -> list[Event]:
        """The events kept, oldest first."""
        return list(self._events)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call ``subscriber`` with every event from now on. Returns a function that ends it."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    def record(self, event: Event) -> None:
        """Keep an event and tell the subscribers; one that raises is logged and does not stop the engine."""
        self._events.append(event)
        for subscriber in tuple(self._subscribers):
            try:
                subscriber(event)
            except Exception:
                logger.exception("a subscriber failed on %r", event)
