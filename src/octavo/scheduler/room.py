"""Stage 2 of 7: whose blocks a request gets when none is free. Before it: ``scheduler``. After it: ``blocks``.

A request takes from those that rank behind it alone, so the first in rank may take everything:

    rank     first ............ request | ........ last running    and      ........ last preempted
    blocks   not touched                | taken next <---------             taken first <----------

Only what a victim would really give back counts: blocks that it shares with others give none. Where nobody behind has
a block alone, the last one gives up all it holds, so that the others own theirs alone or ``request`` need not copy.
"""

from __future__ import annotations

from collections.abc import Iterator

from octavo.blocks import BlockManager
from octavo.request import Request
from octavo.scheduler.admission import StepBudget
from octavo.scheduler.policies import RequestQueue
from octavo.scheduler.step import Preemption


class RoomMaker:
    """Moves requests from the running to the preempted ones, and takes their blocks."""

    def __init__(self, blocks: BlockManager, running: RequestQueue, preempted: RequestQueue) -> None:
        self.held = False
        """Whether a request has been preempted and since then none has ended and no preempted one resumed: nothing is admitted."""
        self.released: list[int] = []
        """Requests whose rows end with the next plan."""
        self._blocks = blocks
        self._running = running
        self._preempted = preempted

    def make(self, request: Request, num_tokens: int, budget: StepBudget) -> int:
        """Free blocks for the next ``num_tokens`` tokens of a request. Returns how many blocks are missing still, 0 or less if none."""
        end = request.num_computed + num_tokens
        while (missing := self._blocks.num_missing(request.id, end) - self._blocks.num_free) > 0:
            victim = self._victim(request)
            if victim is None:
                break
            keep = self._blocks.num_tokens_without(victim.id, missing)
            self._take(victim, request, missing, keep, budget)
        return missing

    def make_for_running(self, request: Request, num_tokens: int, budget: StepBudget) -> int:
        """The same for a running request. Returns for how many tokens there is room now.

        If not even one token has room, nobody ranks behind it: it steps back itself, with its blocks.
        """
        missing = self.make(request, num_tokens, budget)
        if missing <= 0:
            return num_tokens
        room = self._blocks.num_room(request.id)
        if room <= 0:
            self._take(request, request, missing, request.num_computed, budget)
        return min(num_tokens, room)

    def _victim(self, request: Request) -> Request | None:
        """The last one behind ``request`` that owns a block alone, or else that holds any; preempted ones before running ones."""
        alone = next((other for other in self._behind(request) if self._blocks.owns_any_alone(other.id)), None)
        return alone or next((other for other in self._behind(request) if self._blocks.num_held(other.id)), None)

    def _behind(self, request: Request) -> Iterator[Request]:
        for queue in (self._preempted, self._running):
            rank = queue.policy(request)
            for other in reversed(queue.requests):
                if queue.policy(other) <= rank:
                    break
                yield other

    def _take(self, victim: Request, by: Request, missing: int, keep: int, budget: StepBudget) -> None:
        """Cut a request down to its first ``keep`` tokens; if it runs, it stops."""
        was_running = victim in self._running
        if was_running:
            self._running.remove(victim)
            self._preempted.add(victim)
            self.released.append(victim.id)
            self.held = True
            victim.num_preemptions += 1
        lost = victim.num_computed - keep
        freed = self._blocks.truncate(victim.id, keep)
        victim.num_computed = keep
        budget.preempted.append(Preemption(victim.id, by.id, missing, freed, lost, was_running))
