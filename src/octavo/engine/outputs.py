"""From token ids to text: incremental decoding, stop strings, and the objects that a caller gets.

Works between the scheduler's commit and its next schedule, so a stop string ends a request before another token
of it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from octavo.engine.core import RequestUpdate, TokenLogprobs
from octavo.errors import OctavoError
from octavo.request import FinishReason, Logprob, RequestMetrics, SamplingParams
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer

PositionLogprobs = dict[int, Logprob]
"""{token id: Logprob} at one position: the best tokens, and always the one that stands there."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request, as far as it has got."""

    index: int
    """Which sample; where the best n of more are returned, its place among these, best first."""
    text: str
    """Without stop strings and stop tokens."""
    token_ids: tuple[int, ...]
    """With the stop token, if one ended it."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string, or the id among SamplingParams.stop_token_ids, that ended it."""
    cumulative_logprob: float | None = None
    """Sum of its tokens' log-probabilities in the raw distributions, if logprobs were asked for
    or outputs are ranked by it."""
    score: float | None = None
    """Of a beam: cumulative_logprob / len(token_ids) ** length_penalty."""
    logprobs: tuple[PositionLogprobs, ...] | None = None
    """One entry per token."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and its samples."""

    request_id: int
    prompt: str | None
    """The prompt's text, where it was given as text."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    """One entry per prompt token; the first is None."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in the cache and not computed."""
    metrics: RequestMetrics | None = None
    error: OctavoError | None = None
    """Why the request was refused or failed; then ``outputs`` holds what there was before."""

    @property
    def finished(self) -> bool:
        return all(o.finish_reason is not None for o in self.outputs)


@dataclass(slots=True)
class _Sample:
    """The text of one sample.

    text      [ sent ........ | held: may be the start of a stop string ]
              0              sent                                      len
    """

    detokenizer: Detokenizer | None
    """None where the text is decoded once, at the end."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    score: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_sent: int = 0
    """Tokens given out, where outputs are deltas."""
    sent: int = 0
    """Characters given out, where outputs are deltas."""


@dataclass(slots=True)
class _Stream:
    """One request that has not ended, with all of its samples."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    samples: list[_Sample]
    num_running: int
    """Samples that have not ended."""
    deltas: bool = False
    """Outputs hold only what is new since the one before."""
    prompt_sent: bool = False
    prompt_logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    metrics: RequestMetrics | None = None
    error: OctavoError | None = None


class OutputProcessor:
    """Keeps a stream per running request and turns updates into outputs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[int, _Stream] = {}

    def add(
        self,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        stop_ids: frozenset[int],
        incremental: bool,
        deltas: bool = False,
    ) -> None:
        """Start a stream. Without ``incremental`` and without stop strings its text is decoded once, at the end."""
        decode_now = incremental or bool(params.stop)
        samples = [_Sample(Detokenizer(self._tokenizer) if decode_now else None) for _ in range(params.num_samples)]
        self._streams[request_id] = _Stream(prompt, tuple(prompt_token_ids), params, stop_ids, samples, len(samples), deltas)

    def push(self, update: RequestUpdate) -> str | None:
        """Take over an update of a request. Returns the stop string that its sample must be ended for, if any."""
        stream = self._streams[update.request_id]
        sample = stream.samples[update.sample_index]
        if update.beam is not None:
            sample.cumulative_logprob, sample.score = update.beam.cumulative_logprob, update.beam.score
            sample.logprobs += map(self._position, update.beam.logprobs)
        for position, logprobs in update.prompt_logprobs:
            stream.prompt_logprobs[position] = self._position(logprobs)
        stop = self._push_tokens(stream.params, sample, update)
        if update.finish_reason is not None:
            stream.num_running -= 1
            stream.metrics = _merge(stream.metrics, update.metrics)
            stream.error = stream.error or update.error
        if stop is not None:
            sample.finish_reason, sample.stop_reason = FinishReason.STOP, stop
            return stop if update.finish_reason is None else None
        if update.finish_reason is not None and sample.finish_reason is None:
            sample.finish_reason, sample.stop_reason = update.finish_reason, update.stop_reason
        return None

    def _push_tokens(self, params: SamplingParams, sample: _Sample, update: RequestUpdate) -> str | None:
        """Take over new tokens: one after another where one of them may complete a stop string, which drops those behind it."""
        whole = sample.detokenizer is None or sample.finish_reason is not None or not params.stop
        for part in [update] if whole else _one_by_one(update):
            sample.token_ids.extend(part.token_ids)
            for found in part.logprobs:
                sample.cumulative_logprob += found.logprob
                if params.logprobs is not None:
                    sample.logprobs.append(self._position(found))
            if sample.detokenizer is not None and sample.finish_reason is None:
                stop = _push_text(params, sample, sample.detokenizer, part)
                if stop is not None:
                    return stop
        return None

    def has_ended(self, request_id: int) -> bool:
        """Whether all samples of a request have ended."""
        return self._streams[request_id].num_running == 0

    def output(self, request_id: int) -> RequestOutput:
        """The request as far as it has got; ends the stream if all of its samples have ended."""
        stream = self._streams[request_id]
        ended = stream.num_running == 0
        if ended:
            del self._streams[request_id]
        metrics = stream.metrics if ended else None
        return RequestOutput(
            request_id,
            stream.prompt,
            stream.prompt_token_ids,
            tuple(self._completion(stream, sample, index) for index, sample in enumerate(_returned(stream))),
            self._prompt_logprobs(stream),
            metrics.num_cached_tokens if metrics is not None else 0,
            metrics,
            stream.error if ended else None,
        )

    def discard(self, request_id: int) -> None:
        """Forget a request that has ended without a last update for its caller."""
        self._streams.pop(request_id, None)

    def _completion(self, stream: _Stream, sample: _Sample, index: int) -> CompletionOutput:
        params, since = stream.params, sample.num_sent
        text = self._text(stream, sample)
        if stream.deltas:
            text, sample.sent = text[sample.sent :], len(text)
            sample.num_sent = len(sample.token_ids)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=tuple(sample.token_ids[since:]),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            cumulative_logprob=sample.cumulative_logprob if params.num_logprobs is not None or sample.score is not None else None,
            score=sample.score,
            logprobs=tuple(sample.logprobs[since:]) if params.logprobs is not None else None,
        )

    def _text(self, stream: _Stream, sample: _Sample) -> str:
        """All of the text once the sample has ended; before that, what can no longer become part of a stop string."""
        reason = sample.finish_reason
        if sample.detokenizer is None:
            if reason is None:
                return ""
            ends_with_stop = reason is FinishReason.STOP and sample.token_ids[-1] in stream.stop_ids
            return self._tokenizer.decode(sample.token_ids[:-1] if ends_with_stop else sample.token_ids)
        return sample.text if reason is not None else sample.text[: len(sample.text) - _held(sample.text, stream.params.stop)]

    def _prompt_logprobs(self, stream: _Stream) -> tuple[PositionLogprobs | None, ...] | None:
        if stream.params.prompt_logprobs is None or (stream.deltas and stream.prompt_sent):
            return None
        stream.prompt_sent = True
        return tuple(stream.prompt_logprobs.get(i) for i in range(len(stream.prompt_token_ids)))

    def _position(self, found: TokenLogprobs) -> PositionLogprobs:
        text = self._tokenizer.token_text
        entries = {
            token: Logprob(logprob, rank, text(token))
            for rank, (token, logprob) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True), 1)
        }
        entries[found.token_id] = Logprob(found.logprob, found.rank, text(found.token_id))
        return entries


def _one_by_one(update: RequestUpdate) -> list[RequestUpdate]:
    """The same update as one per token; how the sample ended is told by the last one."""
    last = len(update.token_ids) - 1
    if last < 1:
        return [update]
    parts = [update._replace(token_ids=(token,), logprobs=update.logprobs[i : i + 1]) for i, token in enumerate(update.token_ids)]
    return [*(part._replace(finish_reason=None) for part in parts[:last]), parts[last]]


def _push_text(params: SamplingParams, sample: _Sample, detokenizer: Detokenizer, update: RequestUpdate) -> str | None:
    """Decode what is new. Returns the stop string that ends the text now, if any."""
    stopped_by_token = update.finish_reason is FinishReason.STOP
    new = detokenizer.push(update.token_ids[:-1] if stopped_by_token else update.token_ids)
    if update.finish_reason is not None:
        new += detokenizer.finish()
    searched_from = max(0, len(sample.text) - max(map(len, params.stop), default=1) + 1)
    sample.text += new
    if len(sample.token_ids) < params.min_tokens or not new:
        return None
    return _cut_at_stop(sample, params.stop, searched_from)


def _cut_at_stop(sample: _Sample, stops: Sequence[str], start: int) -> str | None:
    """Cut the text before the stop string that comes first (of those that start together, the longest)."""
    found = [(at, -len(stop), stop) for stop in stops if (at := sample.text.find(stop, start)) >= 0]
    if not found:
        return None
    at, _, stop = min(found)
    sample.text = sample.text[:at]
    return stop


def _returned(stream: _Stream) -> list[_Sample]:
    """All samples in their order; or the best n by cumulative log-probability, those given up or failed last."""
    if stream.params.num_samples == stream.params.n:
        return stream.samples

    def key(sample: _Sample) -> tuple[bool, float]:
        return sample.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH), -sample.cumulative_logprob

    return sorted(stream.samples, key=key)[: stream.params.n]


def _merge(one: RequestMetrics | None, other: RequestMetrics | None) -> RequestMetrics | None:
    """Metrics of a request from those of its samples: from the first start to the last end, all preemptions."""
    if one is None or other is None:
        return one or other
    starts = [t for t in (one.admitted_time, other.admitted_time) if t is not None]
    firsts = [t for t in (one.first_token_time, other.first_token_time) if t is not None]
    ends = [t for t in (one.finish_time, other.finish_time) if t is not None]
    return RequestMetrics(
        one.arrival_time,
        min(starts, default=None),
        min(firsts, default=None),
        max(ends, default=None),
        one.num_preemptions + other.num_preemptions,
        min(one.num_cached_tokens, other.num_cached_tokens),
    )


def _held(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that is the beginning of a stop string.

    >>> _held("the en", ("end", "\\n"))
    2
    """
    longest = max(map(len, stops), default=1) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)


def refused(request_id: int, prompt: str | None, token_ids: Sequence[int], error: OctavoError) -> RequestOutput:
    """The output of a request that was refused at submission."""
    completion = CompletionOutput(0, "", (), FinishReason.ERROR)
    return RequestOutput(request_id, prompt, tuple(token_ids), (completion,), error=error)


def with_delta(output: RequestOutput, sent: Sequence[int]) -> RequestOutput:
    """The same output with only the text after the first ``sent[i]`` characters of sample i."""
    outputs = (replace(completion, text=completion.text[start:]) for completion, start in zip(output.outputs, sent, strict=True))
    return replace(output, outputs=tuple(outputs))
