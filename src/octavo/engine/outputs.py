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
    text: str
    """Without stop strings and stop tokens."""
    token_ids: tuple[int, ...]
    """With the stop token, if one ended it."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string, or the id among SamplingParams.stop_token_ids, that ended it."""
    cumulative_logprob: float | None = None
    """Sum of its tokens' log-probabilities in the raw distributions, if logprobs were asked for."""
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
        return self.error is not None or all(o.finish_reason is not None for o in self.outputs)


@dataclass(slots=True)
class _Stream:
    """The text of one running request.

    text      [ sent ........ | held: may be the start of a stop string ]
              0              sent                                      len
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    detokenizer: Detokenizer | None
    """None where the text is decoded once, at the end."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    cumulative_logprob: float = 0.0


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
    ) -> None:
        """Start a stream. Without ``incremental`` and without stop strings its text is decoded once, at the end."""
        detokenizer = Detokenizer(self._tokenizer) if incremental or params.stop else None
        self._streams[request_id] = _Stream(prompt, tuple(prompt_token_ids), params, stop_ids, detokenizer)

    def push(self, update: RequestUpdate) -> str | None:
        """Take over an update of a request. Returns the stop string that ends it now, if any."""
        stream = self._streams[update.request_id]
        stream.token_ids.extend(update.token_ids)
        if update.logprobs is not None:
            stream.logprobs.append(self._position(update.logprobs))
            stream.cumulative_logprob += update.logprobs.logprob
        for position, logprobs in update.prompt_logprobs:
            stream.prompt_logprobs[position] = self._position(logprobs)
        if stream.detokenizer is None:
            return None
        return self._push_text(stream, update)

    def _push_text(self, stream: _Stream, update: RequestUpdate) -> str | None:
        assert stream.detokenizer is not None
        stopped_by_token = update.finish_reason is FinishReason.STOP
        new = stream.detokenizer.push(update.token_ids[:-1] if stopped_by_token else update.token_ids)
        if update.finish_reason is not None:
            new += stream.detokenizer.finish()
        searched_from = max(0, len(stream.text) - max(map(len, stream.params.stop), default=1) + 1)
        stream.text += new
        if len(stream.token_ids) < stream.params.min_tokens or not new:
            return None
        return _cut_at_stop(stream, searched_from)

    def output(self, update: RequestUpdate, stop: str | None = None) -> RequestOutput:
        """The request as far as it has got; ends the stream when the update, or a stop string, ended the request."""
        stream = self._streams[update.request_id]
        reason = FinishReason.STOP if stop is not None else update.finish_reason
        if reason is not None:
            del self._streams[update.request_id]
        params = stream.params
        completion = CompletionOutput(
            index=0,
            text=self._text(stream, reason),
            token_ids=tuple(stream.token_ids),
            finish_reason=reason,
            stop_reason=stop if stop is not None else update.stop_reason,
            cumulative_logprob=stream.cumulative_logprob if params.logprobs is not None else None,
            logprobs=tuple(stream.logprobs) if params.logprobs is not None else None,
        )
        return RequestOutput(
            update.request_id,
            stream.prompt,
            stream.prompt_token_ids,
            (completion,),
            self._prompt_logprobs(stream),
            metrics=update.metrics,
            error=update.error,
        )

    def discard(self, request_id: int) -> None:
        """Forget a stream whose caller no longer listens."""
        self._streams.pop(request_id, None)

    def _text(self, stream: _Stream, reason: FinishReason | None) -> str:
        """All of the text once the request has ended; before that, what can no longer become part of a stop string."""
        if stream.detokenizer is None:
            if reason is None:
                return ""
            ends_with_stop = reason is FinishReason.STOP and stream.token_ids[-1] in stream.stop_ids
            return self._tokenizer.decode(stream.token_ids[:-1] if ends_with_stop else stream.token_ids)
        return stream.text if reason is not None else stream.text[: len(stream.text) - _held(stream.text, stream.params.stop)]

    def _prompt_logprobs(self, stream: _Stream) -> tuple[PositionLogprobs | None, ...] | None:
        if stream.params.prompt_logprobs is None:
            return None
        return tuple(stream.prompt_logprobs.get(i) for i in range(len(stream.prompt_token_ids)))

    def _position(self, found: TokenLogprobs) -> PositionLogprobs:
        text = self._tokenizer.token_text
        entries = {
            token: Logprob(logprob, rank, text(token))
            for rank, (token, logprob) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True), 1)
        }
        entries[found.token_id] = Logprob(found.logprob, found.rank, text(found.token_id))
        return entries


def _cut_at_stop(stream: _Stream, start: int) -> str | None:
    """Cut the text before the stop string that comes first (of those that start together, the longest)."""
    found = [(at, -len(stop), stop) for stop in stream.params.stop if (at := stream.text.find(stop, start)) >= 0]
    if not found:
        return None
    at, _, stop = min(found)
    stream.text = stream.text[:at]
    return stop


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


def with_delta(output: RequestOutput, sent: int) -> RequestOutput:
    """The same output with only the text after the first ``sent`` characters."""
    completion = output.outputs[0]
    return replace(output, outputs=(replace(completion, text=completion.text[sent:]),))
