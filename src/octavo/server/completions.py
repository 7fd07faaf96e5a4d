"""/v1/completions: text, or token ids, continued."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.engine.async_engine import Numbered
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import OctavoError
from octavo.server.logprobs import CompletionLogprobs, prompt_logprobs
from octavo.server.protocol import CompletionRequest
from octavo.server.replies import CompletionReply
from octavo.server.service import Prompts, Service
from octavo.server.sse import STREAMED, EventStream, error_event, event
from octavo.text.tokenizer import Tokenizer

router = APIRouter()


class Usage:
    """Tokens of a call, counted as its outputs come."""

    def __init__(self, prompts: Sequence[tuple[Any, Sequence[int]]]) -> None:
        self.num_prompt = sum(len(token_ids) for _, token_ids in prompts)
        self.num_completion = 0
        self.num_cached = 0

    def add(self, output: RequestOutput) -> None:
        """Count an output, whole or new."""
        self.num_completion += sum(len(completion.token_ids) for completion in output.outputs)
        self.num_cached += output.num_cached_tokens

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's shape."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


def json_response(value: Any) -> Response:
    """A reply of plain values."""
    return Response(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(), media_type="application/json")


def service_of(request: Request) -> Service:
    """The service that a route belongs to."""
    service: Service = request.app.state.service
    return service


@router.post("/v1/completions", response_model=CompletionReply, responses=STREAMED, tags=["completions"])
async def create_completion(body: CompletionRequest, request: Request) -> Any:
    """Complete one prompt or several."""
    service = service_of(request)
    model = service.check_model(body.model)
    params = body.to_params(await service.compile(body.grammars()))
    prompts = await service.encode(body.prompt)
    request_id: str = request.state.request_id
    job = await service.submit(request_id, prompts, params, bool(body.stream))
    reply = _Reply(f"cmpl-{request_id}", service.created_now(), model, body, prompts, service.engine.text.tokenizer)
    if body.stream:
        return EventStream(job, reply)
    return json_response(reply.whole(await job.results(request.receive)))


class _Reply:
    """The reply to one call, whole or as a stream. Choice ``i * n + j`` is sample j of prompt i."""

    def __init__(self, id: str, created: int, model: str, body: CompletionRequest, prompts: Prompts, tokenizer: Tokenizer) -> None:
        self._body = body
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._usage = Usage(prompts)
        self._n = body.n or 1
        self._rich = body.echo or body.max_tokens == 0 or body.logprobs is not None or body.prompt_logprobs is not None
        self._head = {"id": id, "object": "text_completion", "created": created, "model": model}
        self._prefix = json.dumps(self._head)[:-1] + ', "choices": [{"index": '
        self._suffix = '}], "usage": null}' if body.include_usage else "}]}"
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._ended: set[int] = set()
        self._begun: set[int] = set()

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The reply as one object."""
        choices = []
        for i, output in enumerate(outputs):
            self._count(output)
            choices += [self._choice(i, output, completion) for completion in output.outputs]
        return {**self._head, "choices": choices, "usage": self._usage.as_dict()}

    def begin(self) -> str:
        return ""

    def write(self, item: Numbered) -> str:
        i, output = item
        self._count(output)
        events = []
        for completion in output.outputs:
            index = i * self._n + completion.index
            if index in self._ended or not (completion.token_ids or completion.finish_reason):
                continue
            if completion.finish_reason:
                self._ended.add(index)
            if self._rich:
                choice = self._choice(i, output, completion)
                events.append(event(json.dumps(self._head | {"choices": [choice]} | ({"usage": None} if self._body.include_usage else {}))))
            elif completion.finish_reason or completion.text:
                events.append(self._plain_event(index, completion))
        return "".join(events)

    def end(self) -> str:
        usage = event(json.dumps(self._head | {"choices": [], "usage": self._usage.as_dict()})) if self._body.include_usage else ""
        return usage + event("[DONE]")

    def fail(self, error: OctavoError) -> str:
        return error_event(error) + event("[DONE]")

    def _plain_event(self, index: int, completion: CompletionOutput) -> str:
        reason, stop = "null", "null"
        if completion.finish_reason:
            reason, stop = f'"{completion.finish_reason.value}"', json.dumps(completion.stop_reason)
        fields = f'{index}, "text": {json.dumps(completion.text)}, "logprobs": null, "finish_reason": {reason}, "stop_reason": {stop}'
        return f"data: {self._prefix}{fields}{self._suffix}\n\n"

    def _count(self, output: RequestOutput) -> None:
        self._usage.add(output)
        if self._body.max_tokens == 0:
            self._usage.num_completion = 0

    def _choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """A choice with all that may belong to it; what is of the prompt comes with its first part only."""
        body, index = self._body, i * self._n + completion.index
        first = index not in self._begun
        self._begun.add(index)
        text, hidden = completion.text, body.max_tokens == 0
        choice: dict[str, Any] = {"index": index, "text": "" if hidden else text, "logprobs": None}
        if body.echo and first:
            choice["text"] = self._prompt_text(i) + choice["text"]
        if body.logprobs is not None:
            choice["logprobs"] = self._columns(index, output, completion, first)
        choice["finish_reason"] = completion.finish_reason.value if completion.finish_reason else None
        choice["stop_reason"] = completion.stop_reason
        if hidden and completion.finish_reason:
            choice["finish_reason"], choice["stop_reason"] = "length", None
        if body.prompt_logprobs is not None and first and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, output.prompt_logprobs)
        return choice

    def _columns(self, index: int, output: RequestOutput, completion: CompletionOutput, first: bool) -> dict[str, list[Any]]:
        writer = self._logprobs.setdefault(index, CompletionLogprobs(self._tokenizer, self._body.logprobs or 0))
        token_ids: tuple[int, ...] = ()
        positions: tuple[Any, ...] = ()
        if self._body.echo and first and output.prompt_logprobs is not None:
            token_ids, positions = output.prompt_token_ids, output.prompt_logprobs
        if self._body.max_tokens != 0:
            token_ids, positions = token_ids + completion.token_ids, positions + (completion.logprobs or ())
        return writer.columns(token_ids, positions)

    def _prompt_text(self, i: int) -> str:
        text, token_ids = self._prompts[i]
        return self._tokenizer.decode(token_ids) if text is None else text
