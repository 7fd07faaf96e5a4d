"""What crosses between scheduler and runner: a ``StepPlan`` goes in, a ``StepResult`` comes back.

And, once committed, between scheduler and engine: a ``RequestUpdate`` for each request that got anything.

Both are frozen values. A plan is columns, not an object per request: entry ``i`` of each column speaks of
the ``i``-th scheduled request, and concatenated columns are cut by the counts beside them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from operator import add, sub
from typing import NamedTuple

from octavo.errors import EngineError
from octavo.request import FinishReason, RequestMetrics, SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """All that the runner must know to give a request a row: at its first step and at each resumption."""

    request_id: int
    params: SamplingParams
    prompt_len: int
    stop_ids: frozenset[int]
    seed: int
    sample_index: int
    token_ids: array[int]
    """All tokens known, prompt and output; type code 'i'."""
    block_ids: array[int]
    """The whole block table, with the blocks reserved for this step; type code 'i'."""
    resumed: bool = False
    """Whether it ran before and was preempted; for the engine's events, not for the runner."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request that gave up blocks so that another could go on."""

    request_id: int
    by: int
    """The request that needed blocks; the same one where nobody ranks behind it, so that it steps back itself."""
    num_needed: int
    """Blocks that were still missing."""
    num_given: int
    """Blocks given up, from the tail of its table."""
    num_lost: int
    """Computed tokens that lay in them and must be computed again."""
    was_running: bool
    """False where it had been preempted before and now lost more of the blocks it had kept."""


class StepPlan(NamedTuple):
    """One step's work. (A named tuple: of the frozen classes the one that is made fastest.)

    request i     computed before     scheduled now            known
    tokens        0 ............. num_computed[i] ...... + num_scheduled[i] <= len
                                  ^ first position          ^ reaches len: sampled[i] >= 1

    Where num_drafts[i] > 0, so many of the scheduled tokens are drafts, which stand behind the last known token and are no tokens of the
    request until they turn out to be what is sampled. Each scheduled position from the last known token on has a row of logits:

    scheduled     last known    draft 0    draft 1
    sampled       for draft 0   draft 1    what follows             sampled[i] = num_drafts[i] + 1
    """

    step: int
    released: tuple[int, ...]
    """Requests whose rows end, before anything else is done: finished, aborted or preempted. After a step that failed
    it may name requests that have no row (any more); they are passed over."""
    admitted: tuple[Admission, ...]
    """Requests that get a row in this step; each is scheduled in it too."""
    request_ids: array[int]
    """Scheduled requests, type code 'q'."""
    num_computed: array[int]
    """Tokens computed before this step: the position of the first scheduled token. Type code 'i'."""
    num_scheduled: array[int]
    """Tokens to compute now, at least 1. Type code 'i'."""
    token_ids: array[int]
    """The scheduled tokens, concatenated. Type code 'i'."""
    num_new_blocks: array[int]
    """Blocks appended to each table in this step (0 for admitted requests, which bring the whole table). 'i'."""
    new_block_ids: array[int]
    """These blocks, concatenated. Type code 'i'."""
    sampled: array[int]
    """0 where known tokens are left to compute. Else the number of tokens to sample: 1 after the last one; or as many as the
    request has samples, of sample index 0, 1 ...; or one after the last known token and each draft. Type code 'i'."""
    copy_sources: array[int]
    """Blocks to copy before the forward pass (copy-on-write), and ..."""
    copy_targets: array[int]
    """... where they are copied to. Type code 'i'."""
    replaced: array[int]
    """1 where the first of the request's new blocks takes the place of the last block in its table, of which it is a copy.
    Type code 'b'."""
    num_drafts: array[int] = array("i")
    """How many of the scheduled tokens, the last ones, are drafts. Type code 'i'; empty if there is none."""
    preempted: tuple[Preemption, ...] = ()
    """Why requests gave up blocks in this step; for the engine's events, not for the runner."""

    @property
    def num_requests(self) -> int:
        return len(self.request_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_known(self) -> list[int]:
        """Tokens computed once the step is done, but for drafts, of each request: where it is sampled, all that are known."""
        ends = map(add, self.num_computed, self.num_scheduled)
        return [*map(sub, ends, self.num_drafts)] if self.num_drafts else [*ends]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the raw distribution."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    """The best tokens, best first; as many as were asked for."""
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step computed."""

    token_ids: array[int]
    """``sampled`` tokens for each request, in the plan's order. Type code 'i'."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By index into ``token_ids``, for requests that asked for logprobs."""
    prompt_logprobs: dict[int, list[tuple[int, TokenLogprobs]]] = field(default_factory=dict)
    """By request id, for those that asked: (prompt position of the token, its log-probabilities)."""


class FinishedBeam(NamedTuple):
    """A beam that ended: one output of a beam search."""

    token_ids: tuple[int, ...]
    """With the stop token, if one ended it."""
    cumulative_logprob: float
    score: float
    """cumulative_logprob / len(token_ids) ** length_penalty."""
    finish_reason: FinishReason
    """STOP or LENGTH."""
    logprobs: tuple[TokenLogprobs, ...]
    """Of each token, if asked for."""


class RequestUpdate(NamedTuple):
    """What one step brought to one sample of a request. (A named tuple: hundreds are made per step.)"""

    request_id: int
    """The request as its caller knows it, and ..."""
    sample_index: int = 0
    """... which of its samples."""
    token_ids: tuple[int, ...] = ()
    """New output tokens; the ending stop token is among them. More than one where drafts were accepted, and of a beam."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each new token, if asked for."""
    prompt_logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    """(prompt position, its log-probabilities); after a preemption positions come again, with the same values."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None
    """Where the sample has finished."""
    error: EngineError | None = None
    """Where finish_reason is ERROR."""
    beam: FinishedBeam | None = None
    """All of a beam search's output ``sample_index``, at its end; before that there are no new tokens."""
