"""/v1/chat/completions: conversations, through the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from octavo.engine.async_engine import Numbered
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import InvalidRequestError, OctavoError
from octavo.server.completions import Usage, json_response, service_of
from octavo.server.logprobs import chat_logprobs, prompt_logprobs
from octavo.server.protocol import ChatMessage, ChatRequest, ContentPart
from octavo.server.replies import ChatReply
from octavo.server.service import Prompts, Service
from octavo.server.sse import STREAMED, EventStream, error_event, event
from octavo.server.tools import CallParser, ToolCallText, create_parser, forced_calls, messages_with_tools, wants_tools
from octavo.text.tokenizer import Tokenizer

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatReply, responses=STREAMED, tags=["chat"])
async def create_chat_completion(body: ChatRequest, request: Request) -> Any:
    """Answer a conversation."""
    service = service_of(request)
    model = service.check_model(body.model)
    params = body.to_params(await service.compile([*body.grammars(), *forced_calls(body, service.tool_parser)]))
    prompts = await render(service, body)
    request_id: str = request.state.request_id
    job = await service.submit(request_id, prompts, params, bool(body.stream))
    reply = _Reply(f"chatcmpl-{request_id}", service, model, body, prompts)
    if body.stream:
        return EventStream(job, reply)
    return json_response(reply.whole(await job.results(request.receive)))


async def render(service: Service, body: ChatRequest) -> Prompts:
    """The conversation as one prompt, by the template."""
    messages = [plain_message(i, message) for i, message in enumerate(body.messages)]
    variables = dict(body.chat_template_kwargs or {})
    reserved = {"messages", "tools", "bos_token", "eos_token"}.intersection(variables)
    if reserved:
        raise InvalidRequestError(f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}")
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if wants_tools(body) else []
    messages, tools = messages_with_tools(messages, tools, service.template)
    if tools:
        variables["tools"] = tools
    return [(None, await service.render(messages, **variables))]


def plain_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """A message as templates know it: content is text, the developer is the system."""
    plain = message.model_dump(exclude_none=True)
    plain["role"] = "system" if message.role == "developer" else message.role
    if isinstance(message.content, list):
        plain["content"] = "".join(_part_text(index, j, part) for j, part in enumerate(message.content))
    if message.content is None:
        if not message.tool_calls:
            raise InvalidRequestError(f"messages[{index}].content is missing; give it text")
        plain["content"] = ""
    for call in plain.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            raise InvalidRequestError(f"messages[{index}].tool_calls has arguments that are not JSON") from None
    return plain


def _part_text(index: int, j: int, part: ContentPart) -> str:
    if part.type not in ("text", "input_text", "output_text") or part.text is None:
        raise InvalidRequestError(f"messages[{index}].content[{j}] is of type {part.type[:40]!r}; this model reads text parts only")
    return part.text


class _Reply:
    """The reply to one call, whole or as a stream."""

    def __init__(self, id: str, service: Service, model: str, body: ChatRequest, prompts: Prompts) -> None:
        self._body = body
        self._tokenizer: Tokenizer = service.engine.text.tokenizer
        self._usage = Usage(prompts)
        self._head = {"id": id, "object": "chat.completion", "created": service.created_now(), "model": model}
        self._chunk_head = self._head | {"object": "chat.completion.chunk"}
        self._prefix = json.dumps(self._chunk_head)[:-1] + ', "choices": [{"index": '
        self._suffix = ', "finish_reason": null}], "usage": null}' if body.include_usage else ', "finish_reason": null}]}'
        self._parsers: dict[int, CallParser] = {}
        self._with_tools = wants_tools(body)
        self._kind = service.tool_parser
        self._id = id
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The reply as one object."""
        [output] = outputs
        self._usage.add(output)
        choices = [self._choice(output, completion) for completion in output.outputs]
        return {**self._head, "choices": choices, "usage": self._usage.as_dict()}

    def begin(self) -> str:
        return ""

    def write(self, item: Numbered) -> str:
        output = item.output
        self._usage.add(output)
        return "".join(
            self._events(output, completion)
            for completion in output.outputs
            if completion.index not in self._ended and (completion.token_ids or completion.finish_reason)
        )

    def end(self) -> str:
        usage = event(json.dumps(self._chunk_head | {"choices": [], "usage": self._usage.as_dict()})) if self._body.include_usage else ""
        return usage + event("[DONE]")

    def fail(self, error: OctavoError) -> str:
        return error_event(error) + event("[DONE]")

    def _events(self, output: RequestOutput, completion: CompletionOutput) -> str:
        """Chunks of a choice: its role first, then what is new, then why it ended."""
        index = completion.index
        events = []
        if index not in self._begun:
            self._begun.add(index)
            extra = {}
            if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
                extra["prompt_logprobs"] = prompt_logprobs(self._tokenizer, output.prompt_logprobs)
            events.append(self._chunk(index, {"role": "assistant", "content": ""}, **extra))
        content, calls = self._parsed(completion)
        if self._body.logprobs and completion.token_ids:
            events.append(self._chunk(index, {"content": content}, logprobs=self._logprobs(completion)))
        elif content:
            events.append(f'data: {self._prefix}{index}, "delta": {{"content": {json.dumps(content)}}}, "logprobs": null{self._suffix}\n\n')
        events += [self._chunk(index, {"tool_calls": [self._call(index, call) | {"index": call.number}]}) for call in calls]
        if completion.finish_reason is not None:
            self._ended.add(index)
            events.append(self._chunk(index, {}, finish_reason=self._reason(completion), stop_reason=completion.stop_reason))
        return "".join(events)

    def _chunk(self, index: int, delta: dict[str, Any], **others: Any) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | others
        return event(json.dumps(self._chunk_head | {"choices": [choice]} | ({"usage": None} if self._body.include_usage else {})))

    def _parsed(self, completion: CompletionOutput) -> tuple[str, list[ToolCallText]]:
        """What is new of a choice, as content and calls of tools."""
        if not self._with_tools:
            return completion.text, []
        parser = self._parsers.get(completion.index)
        if parser is None:
            parser = self._parsers[completion.index] = create_parser(self._kind, self._body.parallel_tool_calls is not False)
        content, calls = parser.push(completion.text)
        if completion.finish_reason is not None:
            rest, last = parser.finish()
            content, calls = content + rest, calls + last
        return content, calls

    def _call(self, index: int, call: ToolCallText) -> dict[str, Any]:
        call_id = f"call_{self._id[-24:]}{index}_{call.number}"
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _reason(self, completion: CompletionOutput) -> str:
        assert completion.finish_reason is not None
        called = self._with_tools and self._parsers[completion.index].num_calls
        return "tool_calls" if called and completion.finish_reason == "stop" else completion.finish_reason.value

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, self._body.top_logprobs or 0, completion.token_ids, completion.logprobs or ())

    def _choice(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        content, calls = self._parsed(completion)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = [self._call(completion.index, call) for call in calls]
            message["content"] = content or None
        choice = {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion) if self._body.logprobs else None,
            "finish_reason": self._reason(completion),
            "stop_reason": completion.stop_reason,
        }
        if output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, output.prompt_logprobs)
        return choice
