"""Stage 2 of 7: drafts, guesses at a request's next tokens. Before it: ``filling``. After it: ``ngrams``.

Prompt lookup (Saxena 2023): what followed the last tokens where they stood before is likely to follow again. A step computes drafts
behind the last known token and samples in the place of each; a draft that is what was sampled has saved a step.

    known     ... the cat sat on the          drafts      mat  and  slept
    sampled                                          mat  and  purred            two accepted, three new tokens

How many drafts pay (``StepCosts``): a draft costs a row, at most what a row costs where arithmetic bounds a step; a token costs a
step, shared by its requests. A draft pays if it is right with a probability above (cost of a row) / (cost of a token): about
requests / FREE_ROWS, since reading the weights takes as long as the arithmetic of so many rows. The k-th draft is right with the
k-th power of its request's acceptance, which is measured, also while nothing is drafted: new tokens tell whether drafts in their
places would have been right.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from octavo.config import SchedulerConfig
from octavo.request import Request
from octavo.scheduler.ngrams import NgramIndex
from octavo.scheduler.step import StepPlan

FREE_ROWS = 8
"""Rows whose arithmetic takes as long as reading the weights, where it has not been measured; 8 to 20 were, on two machines."""
MAX_REQUESTS = 128
"""With more requests in a step nothing is looked up: arithmetic bounds it."""
MAX_INDEXED = 2048
"""Most tokens that a step takes into indexes (under 1 ms): samples that fork from a long prompt come one after another."""

_PROMPT_ROWS = 64
"""A step with at least so many rows more than requests tells what a row costs where arithmetic bounds it."""
_HEAD = 0.75
"""A row of a prompt over one that is sampled, whose logits are computed too; about 0.8 in a small model, more in a large one."""
_MARGIN = 1.25
"""How much more than its cost a draft must be expected to save, since costs and acceptance are estimates."""
_FIRST_ACCEPTANCE = 0.3
_RISE, _FALL = 1 / 16, 1 / 8
"""The share by which acceptance moves towards 1 with a draft that was right, and to 0 with one that was not: it errs on the low side."""


def num_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many drafts, from the first on, are what was sampled in their places.

    >>> num_accepted([5, 6, 7], [5, 6, 9, 1])
    2
    """
    return next((place for place, draft in enumerate(drafts) if draft != sampled[place]), len(drafts))


def most_drafts(request: Request) -> int:
    """Drafts behind the last known token that can become output; up to ``min_tokens`` alone, from where on stop tokens may be chosen, so that all
    sampled rows of a request have the same biases.
    """
    num_output, min_tokens = request.num_output, request.params.min_tokens
    return (min_tokens if num_output < min_tokens else request.max_tokens) - num_output - 1


class Drafter:
    """What one request's tokens are likely to go on with, and how often that was right."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.acceptance = _FIRST_ACCEPTANCE
        """Probability that a draft is right if the one before it was; a moving estimate."""
        self.paused_until = 0
        """Nothing is looked up before so many tokens are known: where no draft pays, not before a whole guess can be judged."""
        self._index = NgramIndex(shortest, longest)
        self._guess: array[int] = array("i")
        self._num_known = 0
        """Tokens known when ``_guess`` was made."""

    def catch_up(self, token_ids: array[int], most: int) -> int:
        """Learn from new tokens how good the last guess was, and take in up to ``most`` of them. Returns how many it took in."""
        self._learn(token_ids)
        taken = min(most, self._index.num_missing(token_ids))
        self._index.extend(token_ids, taken)
        return taken

    def has_caught_up(self, token_ids: array[int]) -> bool:
        """Whether all tokens have been taken in, so that the next ones can be guessed."""
        return self._index.num_missing(token_ids) == 0

    def guess(self, token_ids: array[int], count: int) -> array[int]:
        """The next ``count`` tokens, or none; a repetition that reaches the end is taken to go on."""
        start = self._index.find(token_ids)
        self._num_known = len(token_ids)
        self._guess = token_ids[start : start + count] if start >= 0 else array("i")
        if 0 < len(self._guess) < count:
            self._guess = (self._guess * count)[:count]
        return self._guess

    def num_worthwhile(self, least: float, most: int) -> int:
        """Drafts that are accepted with more than ``least`` probability each."""
        count, probability = 0, self.acceptance
        while count < most and probability > least:
            count += 1
            probability *= self.acceptance
        return count

    def _learn(self, token_ids: array[int]) -> None:
        for guessed, token in zip(self._guess, token_ids[self._num_known :], strict=False):
            if guessed != token:
                self.acceptance -= _FALL * self.acceptance
                break
            self.acceptance += _RISE * (1 - self.acceptance)
        self._guess = array("i")


class StepCosts:
    """What a row and a step of decodes cost in seconds, of late."""

    def __init__(self) -> None:
        self._row: float | None = None
        self._step: float | None = None

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step has taken this long."""
        num_rows = plan.num_tokens - sum(plan.num_drafts)
        if num_rows >= plan.num_requests + _PROMPT_ROWS:
            self._row = _moved(self._row, seconds / plan.num_tokens / _HEAD)
        elif num_rows == plan.num_requests:
            self._step = _moved(self._step, seconds)

    def least_acceptance(self, num_requests: int) -> float:
        """The probability above which a draft pays in a step of so many decodes."""
        steps_per_row = 1 / FREE_ROWS if self._row is None or self._step is None else self._row / self._step
        return _MARGIN * num_requests * steps_per_row


def _moved(mean: float | None, value: float) -> float:
    return value if mean is None else mean + (value - mean) / 4


class Speculator:
    """The drafters of all running requests."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._most = config.speculative_tokens
        self._shortest, self._longest = config.speculative_ngram_min, config.speculative_ngram_max
        self._drafters: dict[int, Drafter] = {}
        self._costs = StepCosts()
        self._least = 1.0
        self._num_to_index = 0

    def __len__(self) -> int:
        return len(self._drafters)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step has taken this long."""
        if self._most > 0 and seconds > 0:
            self._costs.observe(plan, seconds)

    def begin_step(self, num_requests: int) -> bool:
        """A step of so many requests is about to be drafted for. Returns whether drafts may pay in it."""
        if self._most == 0 or num_requests > MAX_REQUESTS:
            return False
        self._least = self._costs.least_acceptance(num_requests)
        self._num_to_index = MAX_INDEXED
        return self._least < 1.0

    def drafts(self, request: Request, most: int) -> array[int]:
        """Up to ``most`` drafts for a request that computes its last known token in this step; often none.

        None for beams, which choose among continuations, and for outputs bound to a grammar, whose masks are known one token ahead.
        """
        known, drafter = request.token_ids, self._drafters.get(request.id)
        if drafter is None:
            if request.params.beam_width is not None or request.params.constraint is not None:
                return array("i")
            drafter = self._drafters[request.id] = Drafter(self._shortest, self._longest)
        most = min(most, self._most, most_drafts(request))
        if most <= 0 or len(known) < drafter.paused_until:
            return array("i")
        self._num_to_index -= drafter.catch_up(known, self._num_to_index)
        if not drafter.has_caught_up(known):
            return array("i")
        guess = drafter.guess(known, self._most)
        if drafter.acceptance <= self._least:
            drafter.paused_until = len(known) + self._most
            return array("i")
        return guess[: drafter.num_worthwhile(self._least, most)]

    def forget(self, request_id: int) -> None:
        """This request has ended."""
        self._drafters.pop(request_id, None)
