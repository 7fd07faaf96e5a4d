"""Stage 2 of 7: which beams of a group go on. Before it: ``scheduler``. After it: ``step``.

Beam search as ``transformers`` does it (generation/utils.py, ``_beam_search``), on plain numbers: the group is told the best
continuations of each of its beams and answers with the beams of the next step. It knows no blocks and no requests.

    beams        0        1        2          width = 3, one stop token: the best (1 + 1) x 3 of all continuations
    best six     0a -1.2  2c -1.3  1■ -1.4 | 0■ -1.9  0d -2.0  1b -2.2          (■ the stop token)
                 goes on  goes on  finished  dropped  goes on  dropped           only the first width may finish

Ties are broken towards the beam that stands first, then towards the token that its candidates name first; of finished beams
with equal scores the one that finished earlier stands first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from octavo.request import FinishReason, num_candidates
from octavo.scheduler.step import FinishedBeam, TokenLogprobs

EarlyStopping = bool | Literal["never"]


class Candidates(NamedTuple):
    """The best continuations of one beam, best first; ``num_candidates`` of them, or the whole vocabulary."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Natural, of the raw distribution."""


class NextBeam(NamedTuple):
    """A beam of the next step: the beam ``parent`` of this step and one more token."""

    parent: int
    token_id: int
    cumulative_logprob: float


@dataclass(slots=True, eq=False)
class _Node:
    """A token and the way to it. Beams share their history, so a step costs a node per beam and no copy."""

    parent: _Node | None
    token_id: int
    cumulative_logprob: float
    logprobs: TokenLogprobs | None

    def path(self) -> list[_Node]:
        """From the first output token to this one."""
        nodes, node = [self], self.parent
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


_Choice = tuple[float, int, int, int]
"""A continuation: minus its cumulative log-probability, its beam, its rank from 0 among that beam's candidates, its token.
They sort best first. (A plain tuple: tens of them are made per beam group and step.)"""


class _Ended(NamedTuple):
    node: _Node
    score: float
    finish_reason: FinishReason


@dataclass(slots=True)
class BeamGroup:
    """The beams of one request. It starts with one beam, the prompt, at a cumulative log-probability of 0."""

    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    stop_ids: frozenset[int]
    max_tokens: int
    min_tokens: int = 0
    """No stop token is looked at as one of the first this many tokens."""
    num_logprobs: int | None = None
    """Keep the log-probabilities of this many best tokens, and of the chosen one, at each position."""
    num_output: int = 0
    """Tokens of each running beam."""
    done: bool = False
    """Whether the search is over; once decided it stays."""
    _running: list[_Node] = field(default_factory=list)
    _finished: list[_Ended] = field(default_factory=list)
    """At most ``width``, best score first."""

    def advance(self, candidates: Sequence[Candidates]) -> list[NextBeam]:
        """One step: take the candidates of each running beam. Returns the next beams, best first; none if the search is over."""
        assert not self.done, "this search is over"
        assert len(candidates) == max(1, len(self._running)), f"{len(candidates)} lists of candidates for {len(self._running)} beams"
        best = self._best(candidates)
        self.num_output += 1
        at_end, stop_ids = self.num_output >= self.max_tokens, self.stop_ids
        ended = [choice for choice in best[: self.width] if at_end or choice[-1] in stop_ids]
        going_on = [] if at_end else [choice for choice in best if choice[-1] not in stop_ids][: self.width]
        self._finish([self._node(choice, candidates) for choice in ended])
        self._running = [self._node(choice, candidates) for choice in going_on]
        self.done = not going_on or self._decided()
        return [] if self.done else [NextBeam(parent, token, -cost) for cost, parent, _, token in going_on]

    def best(self, n: int) -> list[FinishedBeam]:
        """The ``n`` best of the finished beams, best first; fewer if fewer finished."""
        return [_finished_beam(ended) for ended in self._finished[:n]]

    def _best(self, candidates: Sequence[Candidates]) -> list[_Choice]:
        """The best continuations of all beams, best first. Of each beam no more are looked at than may be among them."""
        wanted = num_candidates(self.width, len(self.stop_ids))
        skipped = self.stop_ids if self.num_output < self.min_tokens else frozenset()
        sums = [node.cumulative_logprob for node in self._running] or [0.0]
        found: list[_Choice] = []
        for parent, (token_ids, logprobs) in enumerate(candidates):
            so_far, limit = sums[parent], found[-1][0] if len(found) == wanted else math.inf
            for rank, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
                cost = -(so_far + logprob)
                if cost >= limit:  # a tie goes to the beam before
                    break
                if token not in skipped:
                    found.append((cost, parent, rank, token))
            found.sort()
            del found[wanted:]
        return found

    def _node(self, choice: _Choice, candidates: Sequence[Candidates]) -> _Node:
        cost, parent, rank, token = choice
        before = self._running[parent] if self._running else None
        return _Node(before, token, -cost, self._logprobs(candidates[parent], rank))

    def _logprobs(self, candidates: Candidates, rank: int) -> TokenLogprobs | None:
        if self.num_logprobs is None:
            return None
        ids, logprobs = candidates
        top = slice(self.num_logprobs)
        return TokenLogprobs(ids[rank], logprobs[rank], logprobs.index(logprobs[rank]) + 1, tuple(ids[top]), tuple(logprobs[top]))

    def _finish(self, nodes: list[_Node]) -> None:
        for node in nodes:
            reason = FinishReason.STOP if node.token_id in self.stop_ids else FinishReason.LENGTH
            self._finished.append(_Ended(node, self._score(node.cumulative_logprob, self.num_output), reason))
        self._finished.sort(key=lambda ended: -ended.score)
        del self._finished[self.width :]

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return float(cumulative_logprob / length**self.length_penalty)

    def _decided(self) -> bool:
        """Whether no running beam can beat the worst finished one, or need not be waited for."""
        if len(self._finished) < self.width:
            return False
        if self.early_stopping is True:
            return True
        longest = self.early_stopping == "never" and self.length_penalty > 0.0
        hoped = self._score(self._running[0].cumulative_logprob, self.max_tokens if longest else self.num_output)
        return hoped <= self._finished[-1].score


def _finished_beam(ended: _Ended) -> FinishedBeam:
    path = ended.node.path()
    return FinishedBeam(
        token_ids=tuple(node.token_id for node in path),
        cumulative_logprob=ended.node.cumulative_logprob,
        score=ended.score,
        finish_reason=ended.finish_reason,
        logprobs=tuple(node.logprobs for node in path if node.logprobs is not None),
    )
