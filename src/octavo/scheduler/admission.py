"""Stage 2 of 7: what one step can still take. Before it: ``scheduler``. After it: ``step``.

``StepBudget`` lives for one step: it counts tokens and requests down and collects the columns of the plan.
``Passing`` lives for one round of admissions: it bounds how often a request that does not fit is passed over.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from octavo.blocks import BlockManager
from octavo.request import MAX_BEST_OF, Request
from octavo.scheduler.step import Admission, Preemption, StepPlan


class StepBudget:
    """The tokens that a step may still compute, and the plan so far."""

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens_left = max_tokens
        self.num_forks_left = MAX_BEST_OF - 1
        """Tokens that can be sampled beyond one per request."""
        self.preempted: list[Preemption] = []
        self._admitted: list[Admission] = []
        self._request_ids = array("q")
        self._num_computed = array("i")
        self._num_scheduled = array("i")
        self._token_ids = array("i")
        self._num_new_blocks = array("i")
        self._new_block_ids = array("i")
        self._sampled = array("i")
        self._replaced = array("b")
        self._drafts: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        """By place in the plan: drafts, and the blocks that they needed."""

    @property
    def num_requests(self) -> int:
        """Requests scheduled so far."""
        return len(self._request_ids)

    def without_fork(self, request: Request, num_tokens: int) -> int:
        """How many of the next ``num_tokens`` tokens can be scheduled: one less where its samples are too many for this step."""
        reaches_end = request.num_computed + num_tokens == len(request.token_ids)
        return num_tokens - (reaches_end and request.num_samples - 1 > self.num_forks_left)

    def add(self, request: Request, num_tokens: int, new_block_ids: Sequence[int] = (), replaced: bool = False) -> None:
        """Schedule the next ``num_tokens`` tokens of a request that has a row. See ``StepPlan.replaced``."""
        start, known = request.num_computed, request.token_ids
        end = start + num_tokens
        self._request_ids.append(request.id)
        self._num_computed.append(start)
        self._num_scheduled.append(num_tokens)
        if num_tokens == 1:
            self._token_ids.append(known[start])
        else:
            self._token_ids.extend(known[start:end])
        self._num_new_blocks.append(len(new_block_ids))
        if new_block_ids:
            self._new_block_ids.extend(new_block_ids)
        self._replaced.append(replaced)
        num_samples = request.num_samples if end == len(known) else 0
        self._sampled.append(num_samples)
        if num_samples > 1:
            self.num_forks_left -= num_samples - 1
        self.num_tokens_left -= num_tokens

    def admit(self, request: Request, num_tokens: int, block_ids: array[int], resumed: bool) -> None:
        """Schedule the next ``num_tokens`` tokens of a request that gets a row with them."""
        r = request
        self._admitted.append(
            Admission(r.id, r.params, r.prompt_len, r.stop_ids, r.seed, r.sample_index, r.token_ids[:], block_ids, resumed)
        )
        self.add(request, num_tokens)

    def decodes(self, running: Iterable[Request]) -> list[tuple[int, Request]]:
        """Those of the ``running`` requests that had a row before and compute just their last known token, with their places in the plan."""
        places = {request_id: place for place, request_id in enumerate(self._request_ids) if self._num_scheduled[place] == 1}
        for admission in self._admitted:
            places.pop(admission.request_id, None)
        found = [(places[request.id], request) for request in running if request.id in places]
        return [(place, request) for place, request in found if self._sampled[place] == 1]

    def add_drafts(self, place: int, drafts: Sequence[int], new_block_ids: Sequence[int]) -> None:
        """Let drafts follow the last known token of the request at this place of the plan, which samples one token so far."""
        self._drafts[place] = drafts, new_block_ids
        self.num_tokens_left -= len(drafts)

    def _insert_drafts(self) -> array[int]:
        """Put the drafts where they belong, the last ones first, so that the places before them do not move. Returns the column of their numbers."""
        num_drafts = array("i", [0]) * len(self._request_ids)
        ends, block_ends = list(accumulate(self._num_scheduled)), list(accumulate(self._num_new_blocks))
        for place, (drafts, new_block_ids) in sorted(self._drafts.items(), reverse=True):
            count, end, block_end = len(drafts), ends[place], block_ends[place]
            self._token_ids[end:end] = array("i", drafts)
            self._new_block_ids[block_end:block_end] = array("i", new_block_ids)
            self._num_scheduled[place] += count
            self._num_new_blocks[place] += len(new_block_ids)
            self._sampled[place] += count
            num_drafts[place] = count
        return num_drafts

    def plan(self, step: int, released: Iterable[int], copies: Mapping[int, int]) -> StepPlan | None:
        """The finished plan, or None if nothing was scheduled. copies: {target: source}."""
        if not self._request_ids:
            return None
        num_drafts = self._insert_drafts() if self._drafts else array("i")
        return StepPlan(
            step=step,
            released=tuple(released),
            admitted=tuple(self._admitted),
            request_ids=self._request_ids,
            num_computed=self._num_computed,
            num_scheduled=self._num_scheduled,
            token_ids=self._token_ids,
            num_new_blocks=self._num_new_blocks,
            new_block_ids=self._new_block_ids,
            sampled=self._sampled,
            copy_sources=array("i", copies.values()),
            copy_targets=array("i", copies.keys()),
            replaced=self._replaced,
            num_drafts=num_drafts,
            preempted=tuple(self.preempted),
        )


def hold_cached(request: Request, blocks: BlockManager, copies: bool = True) -> bool:
    """Take hold of what is cached of a request's tokens, if all of them fit then. See ``BlockManager.admit``."""
    params = request.params
    # Log-probabilities of the prompt take its logits, so it is computed; once there is output, they have been delivered.
    reads = params.cache_prefix and (params.prompt_logprobs is None or request.num_output > 0)
    found = blocks.admit(request.id, request.token_ids, params.cache_salt, reads, params.cache_prefix, copies)
    if found is not None:
        request.num_computed = found
    return found is not None


class Passing:
    """Requests that did not fit in this round of admissions, and whether others may still pass them."""

    def __init__(self, max_passed_over: int) -> None:
        self._max = max_passed_over
        self._waiting: list[Request] = []

    @property
    def allowed(self) -> bool:
        """Whether a younger request may be admitted now. Looks at no more than ``max_passed_over`` + 1 requests a step."""
        return len(self._waiting) <= self._max and all(request.num_passed_over < self._max for request in self._waiting)

    def skip(self, request: Request) -> None:
        """This request does not fit now."""
        self._waiting.append(request)

    def admitted(self) -> None:
        """A request behind those skipped has been admitted."""
        for request in self._waiting:
            request.num_passed_over += 1
