"""A drafter that knows what comes next, and says so or something else: any drafts at all must change no token."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence

from octavo.config import SchedulerConfig
from octavo.request import Request
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.speculation import Speculator, most_drafts


class AnyDrafts(Speculator):
    """Drafts that are right, wrong, or right at first, in any number; ``expected`` tells the tokens that follow a request's own."""

    def __init__(self, config: SchedulerConfig, expected: Callable[[Request], Sequence[int]], seed: int = 0) -> None:
        super().__init__(config)
        self.most = config.speculative_tokens
        self.expected = expected
        self.chance = random.Random(seed)
        self.num_drafts = 0

    def begin_step(self, num_requests: int) -> bool:
        return self.most > 0

    def drafts(self, request: Request, most: int) -> array[int]:
        most = min(most, self.most, most_drafts(request))
        if most <= 0 or request.params.beam_width is not None:
            return array("i")
        drafts = array("i", self.expected(request)[: self.chance.randint(0, most)])
        if drafts and self.chance.random() < 0.4:
            drafts[self.chance.randrange(len(drafts))] = 1
        self.num_drafts += len(drafts)
        return drafts


def draft_with(scheduler: Scheduler, speculator: Speculator) -> None:
    scheduler._speculator = scheduler._filler._speculator = speculator
