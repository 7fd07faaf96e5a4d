"""Stage 2 of 7: whose blocks a request gets when none is free. Before it: ``scheduler``. After it: ``blocks``.

A request takes from those that rank behind it alone, so the first in rank may take everything:

    rank     first ............ request | ........ last running    and      ........ last preempted
    blocks   not touched                | taken next <---------             taken first <----------

Only what a victim would really give back counts: blocks that it shares with others give none. Where nobody behind has
a block alone, the last one gives up all it holds, so that the others own theirs alone or ``request`` need not copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from octavo.blocks import BlockManager
from octavo.request import Request
from octavo.scheduler.admission import StepBudget
from octavo.scheduler.beam_search import BeamSearch
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import Preemption


class RoomMaker:
    """Moves requests from the running to the preempted ones, and takes their blocks."""

    def __init__(self, blocks: BlockManager, queues: Queues) -> None:
        self.held = False
        """Whether a request has been preempted and since then none has ended and no preempted one resumed: nothing is admitted."""
        self.released: list[int] = []
        """Requests whose rows end with the next plan."""
        self._blocks = blocks
        self._queues = queues

    def make(self, request: Request, num_needed: Callable[[], int], budget: StepBudget) -> int:
        """Free the blocks that a request needs. Returns how many are missing still, 0 or less if none.

        ``num_needed`` is asked again after each victim: what it gives up may have been shared with ``request``.
        """
        while (missing := num_needed() - self._blocks.num_free) > 0:
            victim = self._victim(request)
            if victim is None:
                break
            self._take(victim, request, missing, self._blocks.num_tokens_without(self._ids(victim), missing), budget)
        return missing

    def make_for_running(self, request: Request, num_tokens: int, budget: StepBudget) -> int:
        """The same for a running request. Returns for how many tokens there is room now.

        If not even one token has room, nobody ranks behind it: it steps back itself, with its blocks.
        """
        end = request.num_computed + num_tokens
        missing = self.make(request, lambda: self._blocks.num_missing(request.id, end), budget)
        if missing <= 0:
            return num_tokens
        room = self._blocks.num_room(request.id)
        if room <= 0:
            self.step_back(request, missing, budget)
        return min(num_tokens, room)

    def make_for_beams(self, search: BeamSearch, takes: Sequence[tuple[Request, int]], budget: StepBudget) -> bool:
        """The same for beams and the numbers of their next tokens, all or none: without room for all, all step back."""
        ends = {beam.id: beam.num_computed + num_tokens for beam, num_tokens in takes}
        missing = self.make(search.request, lambda: self._blocks.num_missing_together(ends), budget)
        if missing > 0:
            self.step_back(search.request, missing, budget)
        return missing <= 0

    def step_back(self, request: Request, missing: int, budget: StepBudget) -> None:
        """Stop a running request that cannot go on. It keeps its blocks."""
        self._take(request, request, missing, max(part.num_computed for part in self._queues.parts(request)), budget)

    def _ids(self, request: Request) -> list[int]:
        return [part.id for part in self._queues.parts(request)]

    def _victim(self, request: Request) -> Request | None:
        """The last one behind ``request`` that owns a block alone, or else that holds any; preempted ones before running ones."""
        blocks = self._blocks
        alone = next((other for other in self._behind(request) if blocks.owns_any_alone(self._ids(other))), None)
        return alone or next((other for other in self._behind(request) if any(map(blocks.num_held, self._ids(other)))), None)

    def _behind(self, request: Request) -> Iterator[Request]:
        for queue in (self._queues.preempted, self._queues.running):
            rank = queue.policy(request)
            for other in reversed(queue.requests):
                if queue.policy(other) <= rank:
                    break
                yield other

    def _take(self, victim: Request, by: Request, missing: int, keep: int, budget: StepBudget) -> None:
        """Cut a request, with all of its beams, down to its first ``keep`` tokens; if it runs, it stops."""
        search = self._queues.searches.get(victim.id)
        was_running = victim in self._queues.running
        if was_running:
            self._queues.running.remove(victim)
            self._queues.preempted.add(victim)
            self.released += self._ids(victim)
            self.held = True
            victim.num_preemptions += 1
        lost, freed = self._cut(victim, keep) if search is None else search.cut(keep, self._blocks)
        budget.preempted.append(Preemption(victim.id, by.id, missing, freed, lost, was_running))

    def _cut(self, victim: Request, keep: int) -> tuple[int, int]:
        lost = max(0, victim.num_computed - keep)
        freed = self._blocks.truncate(victim.id, victim.num_computed - lost)
        victim.num_computed -= lost
        return lost, freed
