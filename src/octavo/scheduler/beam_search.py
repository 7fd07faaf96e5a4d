"""Stage 2 of 7: the beams of one request while it runs. Before it: ``scheduler``. After it: ``blocks``, ``beams``.

Each beam is a request of its own to blocks and runner. The scheduler keeps them as one: they wait for each other, so that a
step of the search has the candidates of all, and they are preempted and resumed together.

    known tokens    beam 0   prompt prompt a b c        a beam that goes on in one next beam does so in place;
                    beam 1   prompt prompt a b d        where several go on from one, all but the first are forks
                    beam 2   prompt prompt a e f
                             `--- shared --'
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from octavo.blocks import BlockManager
from octavo.request import FinishReason, Request, RequestMetrics, split_id
from octavo.scheduler.admission import StepBudget, hold_cached
from octavo.scheduler.beams import BeamGroup, Candidates
from octavo.scheduler.step import FinishedBeam, RequestUpdate, TokenLogprobs


class Rejoin(NamedTuple):
    """A beam that has lost tokens which it has in common with a beam before it."""

    beam: Request
    source: Request
    num_tokens: int
    """Tokens in common. Once ``source`` has computed them again, ``beam`` forks from it, and the group holds no more than before."""


class BeamSearch:
    """The beams of one request, which stands for them all in the queues and is the only one at first."""

    def __init__(self, request: Request) -> None:
        params = request.params
        assert params.beam_width is not None
        self.request = request
        self.beams = [request]
        self.placed: set[int] = set()
        """Ids of beams that have rows in the runner."""
        self._num_forks = 0
        self._candidates: dict[int, Candidates] = {}
        self._group = BeamGroup(
            params.beam_width, params.length_penalty, params.early_stopping, request.stop_ids, request.max_tokens, params.min_tokens,
            params.logprobs,
        )  # fmt: skip

    @property
    def done(self) -> bool:
        return self._group.done

    @property
    def ready(self) -> bool:
        """Whether the candidates of all beams are known."""
        return len(self._candidates) == len(self.beams)

    def beam(self, beam_id: int) -> Request:
        return next(beam for beam in self.beams if beam.id == beam_id)

    def offer(self, beam_id: int, found: TokenLogprobs) -> None:
        """The continuations of a beam whose known tokens have all been computed."""
        self._candidates[beam_id] = Candidates(found.top_ids, found.top_logprobs)

    def advance(self, blocks: BlockManager) -> list[Request]:
        """Choose the next beams and fork blocks where they diverge. Returns the beams that end, all of them if the search is over.

        To release the ended ones' blocks is left to the caller.
        """
        old, candidates = self.beams, self._candidates
        self.beams, self._candidates = [], {}
        went_on = set()
        for following in self._group.advance([candidates[beam.id] for beam in old]):
            beam = old[following.parent]
            if following.parent in went_on:
                beam = self._fork(beam, blocks)
            went_on.add(following.parent)
            beam.token_ids.append(following.token_id)
            self.beams.append(beam)
        ended = [beam for index, beam in enumerate(old) if index not in went_on]
        self.placed.difference_update(beam.id for beam in ended)
        return ended

    def _fork(self, parent: Request, blocks: BlockManager) -> Request:
        """A beam of the parent's computed tokens: all that were known before this step."""
        self._num_forks += 1
        child = parent.fork(self._num_forks)
        del child.token_ids[parent.num_computed :]
        blocks.fork(parent.id, child.id, child.token_ids)
        return child

    def outputs(self) -> list[RequestUpdate]:
        """The best beams of a search that is over, as many as were asked for."""
        return [self._output(index, beam) for index, beam in enumerate(self._group.best(self.request.params.n))]

    def _output(self, index: int, beam: FinishedBeam) -> RequestUpdate:
        reason, last = beam.finish_reason, beam.token_ids[-1]
        asked = reason is FinishReason.STOP and last in self.request.params.stop_token_ids
        return RequestUpdate(self.request.id, index, beam.token_ids, finish_reason=reason, stop_reason=last if asked else None, beam=beam)

    def metrics(self) -> list[RequestMetrics]:
        """Of each output; preemptions are counted in the first alone, as they were all outputs' at once."""
        first = self.request.metrics
        return [first, *[first._replace(num_preemptions=0)] * (self.request.params.n - 1)]

    def takes(self, blocks: BlockManager, num_tokens_left: int, num_behind: int) -> list[tuple[Request, int]]:
        """Which beams can compute how many tokens now: those that do not wait for the other beams, as far as the budget goes.

        The ``num_behind`` requests behind these get at least one token each, if there are as many.
        """
        waiting = self._rejoin(blocks)
        taken = []
        for beam in self.beams:
            num_tokens = len(beam.token_ids) - beam.num_computed
            if num_tokens == 0 or beam.id in waiting:
                continue
            if num_tokens_left <= 0:
                break
            num_tokens = min(num_tokens, max(1, num_tokens_left - num_behind))
            num_tokens_left -= num_tokens
            taken.append((beam, num_tokens))
        return taken

    def schedule(self, takes: Sequence[tuple[Request, int]], blocks: BlockManager, budget: StepBudget) -> None:
        """Put beams and the numbers of their next tokens into the plan; there is room for them."""
        for beam, num_tokens in takes:
            new_blocks = blocks.reserve(beam.id, beam.num_computed + num_tokens)
            assert new_blocks is not None, f"beam {split_id(beam.id)} was found to fit but does not"
            if beam.id in self.placed:
                budget.add(beam, num_tokens, new_blocks, bool(new_blocks) and new_blocks[0] in blocks.copies)
            else:
                resumed = self.request.num_preemptions > 0 and not self.placed
                budget.admit(beam, num_tokens, blocks.block_ids(beam.id), resumed)
                self.placed.add(beam.id)

    def hold(self, blocks: BlockManager) -> bool:
        """Begin, or resume: hold what is cached of the beams' tokens, if all of them fit then."""
        if len(self.beams) == 1:
            return hold_cached(self.beams[0], blocks)
        if self.num_missing(blocks) > blocks.num_free:
            return False
        waiting = {join.beam.id for join in self.rejoins()}
        return all(hold_cached(beam, blocks, copies=False) for beam in self.beams if beam.id not in waiting)

    # ---------------------------------------------------------------- preemption

    def cut(self, num_tokens: int, blocks: BlockManager) -> tuple[int, int]:
        """Keep the first ``num_tokens`` tokens of each beam, and no rows. Returns how many tokens were lost and how many blocks became free."""
        self.placed.clear()
        lost = freed = 0
        for beam in self.beams:
            keep = min(beam.num_computed, num_tokens)
            lost += beam.num_computed - keep
            freed += blocks.truncate(beam.id, keep) if blocks.num_held(beam.id) else 0
            beam.num_computed = keep
            if keep < len(beam.token_ids):
                self._candidates.pop(beam.id, None)  # they will be found again
        return lost, freed

    def rejoins(self) -> Iterator[Rejoin]:
        """Beams that have to wait for another's tokens, in the order in which they can fork."""
        for index, beam in enumerate(self.beams):
            if index and beam.num_computed + 1 < len(beam.token_ids):
                common, earliest = max((_common(other, beam), -at) for at, other in enumerate(self.beams[:index]))
                if beam.num_computed < common:
                    yield Rejoin(beam, self.beams[-earliest], common)

    def num_missing(self, blocks: BlockManager) -> int:
        """Free blocks that it takes to compute all known tokens of all beams."""
        apart = {join.beam.id: join.num_tokens // blocks.block_size for join in self.rejoins()}
        needed = {beam.id: -(-len(beam.token_ids) // blocks.block_size) for beam in self.beams}
        together = {beam.id: len(beam.token_ids) for beam in self.beams if beam.id not in apart}
        return blocks.num_missing_together(together) + sum(needed[beam_id] - shared for beam_id, shared in apart.items())

    def _rejoin(self, blocks: BlockManager) -> set[int]:
        """Fork the beams whose lost tokens have been computed again by another. Returns the ids of those that still wait."""
        waiting = set()
        for beam, source, num_tokens in self.rejoins():
            if source.num_computed < num_tokens:
                waiting.add(beam.id)
                continue
            blocks.release(beam.id)
            blocks.fork(source.id, beam.id, beam.token_ids)
            blocks.truncate(beam.id, num_tokens)
            beam.num_computed = num_tokens
        return waiting


def _common(one: Request, other: Request) -> int:
    """Known tokens that two beams of equal length have in common from the start; at most all but the last.

    Halving finds it, as all tokens before a common one are common.
    """
    low, high = 0, len(one.token_ids) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if one.token_ids[low:middle] == other.token_ids[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
