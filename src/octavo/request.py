"""Stage 1 of 7: a request. Before it: the caller. After it: ``scheduler``.

A request has tokens known (its prompt, then what was sampled) and tokens computed (those whose keys and
values are in the cache). A step lets the second catch up with the first; there are no phases.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from octavo.errors import InvalidRequestError

MAX_LOGPROBS = 64
MAX_BEST_OF = 128
"""Most samples of one request."""


class FinishReason(StrEnum):
    """Why an output ended."""

    STOP = "stop"  # a stop token, the end of sequence or a stop string
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the caller gave it up
    ERROR = "error"  # it was refused, or the engine failed


class Logprob(NamedTuple):
    """One candidate token: natural log-probability in the raw distribution, rank from 1, text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class ConstraintState(Protocol):
    """How far an output has got within its constraint."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """The output goes on with these tokens."""

    def fill(self, address: int, num_bytes: int) -> None:
        """Write a bit per token at ``address``, lowest first: whether it may come next."""


class Constraint(Protocol):
    """What an output is bound to, such as a grammar; see ``text.grammar``."""

    def start(self) -> ConstraintState:
        """The state before the first token."""


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidRequestError(message)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. Frozen; unknown arguments are errors.

    The order of operations on the logits of a row is fixed: ``logit_bias``, ``allowed_token_ids``,
    ``forbidden_token_ids`` and (before ``min_tokens``) the stop tokens; repetition, frequency and presence
    penalties; temperature; top-k; top-p; min-p. Log-probabilities are of the raw distribution, before all of these.

    >>> SamplingParams(temperature=0.0, max_tokens=8).greedy
    True
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    octavo.errors.InvalidRequestError: top_p must be in (0, 1], not 1.5
    """

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token always."""
    top_k: int = 0
    """Keep the k most likely tokens (ties: the lower id first); 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens until their probabilities sum to top_p."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit if it occurs in the output."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of single tokens."""
    allowed_token_ids: Sequence[int] | None = None
    """If given, no other token can be chosen."""
    forbidden_token_ids: Sequence[int] = ()
    """Tokens that cannot be chosen."""
    seed: int | None = None
    """Seed of this request's chance; None derives one from the engine's seed and the request's number."""
    max_tokens: int | None = 16
    """Most tokens to generate; None is the rest of the context."""
    min_tokens: int = 0
    """No stop token is chosen, and no stop string ends the output, before this many tokens."""
    stop: str | Sequence[str] = ()
    """Strings that end the output; they are not part of its text."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the output, besides the model's own; they are part of token_ids and not of the text."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """Log-probabilities of this many best tokens, and of the chosen one, at each output position."""
    prompt_logprobs: int | None = None
    """The same for each prompt position; the first entry is None."""
    n: int = 1
    """Outputs to return: samples, which share the prompt's blocks (sample i is the same whatever n is); or the best beams."""
    best_of: int | None = None
    """Samples to draw, of which the n with the highest cumulative log-probability are returned, best first; None draws n."""
    cache_prefix: bool = True
    """Use what is cached of the prompt, and leave blocks for others; False does neither."""
    cache_salt: str | None = None
    """Share cached blocks only with requests of the same salt, such as those of one tenant."""
    priority: int = 0
    """Under the priority policy, lower runs first."""
    beam_width: int | None = None
    """Beam search with this many beams, as ``transformers`` does it; it takes temperature=0.0. None is no beam search."""
    length_penalty: float = 1.0
    """A beam's score is its cumulative log-probability / its length ** length_penalty; above 0 favours long outputs."""
    early_stopping: bool | Literal["never"] = False
    """True ends the search once beam_width beams have finished; False once no running beam, scored at its present length, beats
    the worst of these; "never" once none could with max_tokens (if length_penalty is positive)."""

    constraint: Constraint | None = None
    """Binds the output to a grammar, which is compiled beforehand: see ``TextEngine.compile_grammar``."""

    def __post_init__(self) -> None:
        self._check_numbers()
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for name in ("stop_token_ids", "forbidden_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(sorted(set(self.allowed_token_ids))))
            _require(bool(self.allowed_token_ids), "allowed_token_ids is empty, so no token could ever be chosen")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", {int(k): float(v) for k, v in self.logit_bias.items()})
        _require(all(isinstance(s, str) and s for s in self.stop), "stop strings must be text that is not empty")
        self._check_beams()
        if self.constraint is not None:
            for name, off in _NOT_WITH_CONSTRAINT.items():
                value = getattr(self, name)
                _require(value == off, f"{name} does not go with an output that is bound to a grammar: leave it at {off}, not {value!r}")

    def _check_numbers(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "length_penalty"):
            value = getattr(self, name)
            _require(isinstance(value, int | float) and math.isfinite(value), f"{name} must be a finite number, not {value!r}")
        _require(self.temperature >= 0, f"temperature must be 0 or more, not {self.temperature}")
        _require(self.top_k >= -1, f"top_k must be -1 or 0 (off) or positive, not {self.top_k}")
        _require(0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p}")
        _require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], not {self.min_p}")
        _require(self.repetition_penalty > 0, f"repetition_penalty must be positive, not {self.repetition_penalty}")
        for name in ("frequency_penalty", "presence_penalty"):
            _require(abs(getattr(self, name)) <= 2, f"{name} must be in [-2, 2], not {getattr(self, name)}")
        _require(self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be at least 1 or None, not {self.max_tokens}")
        _require(self.min_tokens >= 0, f"min_tokens must not be negative, not {self.min_tokens}")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or 0 <= value <= MAX_LOGPROBS, f"{name} must be None or from 0 to {MAX_LOGPROBS}, not {value}")
        _require(self.n >= 1, f"n must be at least 1, not {self.n}")
        _require(
            self.n <= self.num_samples <= MAX_BEST_OF,
            f"best_of must be from n ({self.n}) to {MAX_BEST_OF}, or None for n, not {self.num_samples}"
            if self.best_of is not None
            else f"n must be at most {MAX_BEST_OF}, not {self.n}",
        )
        _require(self.cache_salt is None or isinstance(self.cache_salt, str), f"cache_salt must be text or None, not {self.cache_salt!r}")
        _require(self.seed is None or -(2**63) <= self.seed < 2**64, f"seed must fit in 64 bits, not {self.seed}")

    def _check_beams(self) -> None:
        legal = self.early_stopping in (True, False, "never")
        _require(legal, f'early_stopping must be True, False or "never", not {self.early_stopping!r}')
        if self.beam_width is None:
            unused = (self.length_penalty, self.early_stopping) == (1.0, False)
            _require(unused, "length_penalty and early_stopping are for beam search: give beam_width too, or leave them out")
            return
        _require(self.beam_width >= 1, f"beam_width must be at least 1, or None for no beam search, not {self.beam_width}")
        _require(self.greedy, f"beam search does not sample: set temperature=0.0 with beam_width, not {self.temperature}")
        _require(not self.stop, "beam search cannot end at stop strings; use stop_token_ids, or no beam_width")
        _require(self.best_of is None, "beam search draws no samples: leave best_of out; n of the beam_width beams are returned")
        _require(self.n <= self.beam_width, f"n={self.n} outputs are more than the beams: beam_width={self.beam_width}")
        for name, off in _NOT_WITH_BEAMS.items():
            value = getattr(self, name)
            _require(value == off, f"beam search takes the model's own probabilities: leave {name} at {off}, not {value!r}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def num_samples(self) -> int:
        """Samples to draw."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities wanted at each output position: those asked for, or the chosen token's where samples are ranked by it."""
        return 0 if self.logprobs is None and self.num_samples > self.n else self.logprobs

    @property
    def penalised(self) -> bool:
        """Whether any penalty looks at the tokens so far."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


_NOT_WITH_CONSTRAINT = {"beam_width": None, "allowed_token_ids": None, "min_tokens": 0, "ignore_eos": False}
_NOT_WITH_BEAMS = {
    "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "logit_bias": None, "allowed_token_ids": None, "forbidden_token_ids": (),
}  # fmt: skip


def num_candidates(beam_width: int, num_stop_ids: int) -> int:
    """Continuations that a beam search looks at in each step: enough that ``beam_width`` go on if every beam could end.

    >>> [num_candidates(4, stops) for stops in (0, 1, 3)]
    [8, 8, 16]
    """
    return max(2, 1 + num_stop_ids) * beam_width


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way through the engine. Its progress is changed by the scheduler alone.

    token_ids   [ prompt .......... | output ........ ]
                0 .. num_computed .................. num_known
                     ^ in the cache  ^ still to be computed

    A request of several samples is one of these until its prompt is computed; then each sample is one, see ``fork``.
    """

    id: int
    """Unique; the number that its caller knows it by is ``group_id``."""
    prompt_len: int
    params: SamplingParams
    max_tokens: int
    """Most output tokens: params.max_tokens, or the rest of the context."""
    stop_ids: frozenset[int]
    """Tokens that end the output: the model's own (unless ignore_eos) and params.stop_token_ids."""
    seed: int
    token_ids: array[int]
    """Tokens known: prompt, then output. Type code 'i'."""
    arrival_time: float = 0.0
    sample_index: int = 0
    num_samples: int = 1
    """Samples still to be drawn as one: params.num_samples until it forks, then 1."""
    num_computed: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the cache when it was first admitted."""
    num_preemptions: int = 0
    num_passed_over: int = 0
    """Younger requests admitted while this one waited and did not fit."""
    admitted_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = field(default=None)
    """The stop token id or stop string that ended it, where it was neither the model's own nor the length."""

    @property
    def num_rows(self) -> int:
        """Rows of the runner that it takes at most at a time."""
        return self.params.beam_width or 1

    @property
    def group_id(self) -> int:
        """The request that its caller submitted."""
        return self.id & _GROUP_MASK

    @property
    def num_known(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def metrics(self) -> RequestMetrics:
        """Its times and counts so far."""
        return RequestMetrics(
            self.arrival_time, self.admitted_time, self.first_token_time, self.finish_time, self.num_preemptions, self.num_cached_tokens
        )

    def fork(self, number: int) -> Request:
        """A request like this one, as far as it has got, with its own tokens and ``number`` as its sample index."""
        return Request(
            fork_id(self.group_id, number), self.prompt_len, self.params, self.max_tokens, self.stop_ids, self.seed, self.token_ids[:],
            self.arrival_time, sample_index=number, num_computed=self.num_computed, num_cached_tokens=self.num_cached_tokens,
            admitted_time=self.admitted_time, first_token_time=self.first_token_time,
        )  # fmt: skip


class RequestMetrics(NamedTuple):
    """Times of one request, in seconds of the engine's clock, None where it did not get so far; and its preemptions."""

    arrival_time: float
    admitted_time: float | None
    first_token_time: float | None
    finish_time: float | None
    num_preemptions: int
    num_cached_tokens: int = 0
    """Prompt tokens found in the cache."""


_GROUP_BITS = 40
_GROUP_MASK = (1 << _GROUP_BITS) - 1


def fork_id(request_id: int, number: int) -> int:
    """Id of a fork of a request; fork 0 is the request itself."""
    return request_id | number << _GROUP_BITS


def split_id(fork: int) -> tuple[int, int]:
    """The request that its caller submitted, and the number of the fork.

    >>> split_id(fork_id(7, 3)), split_id(7)
    ((7, 3), (7, 0))
    """
    return fork & _GROUP_MASK, fork >> _GROUP_BITS
