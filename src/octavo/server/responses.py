"""/v1/responses: text in, text out; nothing is stored."""

from __future__ import annotations

import json
import time
from typing import Any

from fastapi import APIRouter, Request

from octavo.engine.async_engine import Numbered
from octavo.engine.outputs import RequestOutput
from octavo.errors import OctavoError
from octavo.request import FinishReason
from octavo.server.chat import plain_message
from octavo.server.completions import Usage, json_response, service_of
from octavo.server.protocol import ResponsesRequest
from octavo.server.replies import ResponsesReply
from octavo.server.service import Prompts
from octavo.server.sse import STREAMED, EventStream, event

router = APIRouter()


@router.post("/v1/responses", response_model=ResponsesReply, responses=STREAMED, tags=["responses"])
async def create_response(body: ResponsesRequest, request: Request) -> Any:
    """Answer an input."""
    service = service_of(request)
    model = service.check_model(body.model)
    params = body.to_params(await service.compile(body.grammars()))
    messages = [plain_message(i, message) for i, message in enumerate(body.messages)]
    prompts: Prompts = [(None, await service.render(messages))]
    request_id: str = request.state.request_id
    job = await service.submit(request_id, prompts, params, bool(body.stream))
    reply = _Reply(request_id, model, body, prompts)
    if body.stream:
        return EventStream(job, reply)
    [output] = await job.results(request.receive)
    return json_response(reply.whole(output))


class _Reply:
    """The reply to one call, whole or as a stream of numbered, named events."""

    def __init__(self, request_id: str, model: str, body: ResponsesRequest, prompts: Prompts) -> None:
        self._usage = Usage(prompts)
        self._text = ""
        self._length = False
        self._number = -1
        self._item_id = f"msg_{request_id}"
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._base = {
            "id": f"resp_{request_id}", "object": "response", "created_at": int(time.time()), "error": None, "incomplete_details": None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {},
            "model": model, "parallel_tool_calls": True, "previous_response_id": None, "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature, "text": {"format": {"type": "text"}},
            "tool_choice": "auto", "tools": [], "top_p": 1.0 if body.top_p is None else body.top_p, "truncation": "disabled",
        }  # fmt: skip

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The reply as one object."""
        self._take(output)
        return self._response()

    def begin(self) -> str:
        response = self._base | {"status": "in_progress", "output": [], "usage": None}
        item = self._item("in_progress") | {"content": []}
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._place, part=self._part(""))
        )

    def write(self, item: Numbered) -> str:
        new = self._take(item.output)
        return self._event("response.output_text.delta", **self._place, delta=new, logprobs=[]) if new else ""

    def end(self) -> str:
        status = self._status
        return (
            self._event("response.output_text.done", **self._place, text=self._text, logprobs=[])
            + self._event("response.content_part.done", **self._place, part=self._part(self._text))
            + self._event("response.output_item.done", output_index=0, item=self._item(status))
            + self._event(f"response.{status}", response=self._response())
        )

    def fail(self, error: OctavoError) -> str:
        failed: dict[str, Any] = {"status": "failed", "output": [], "usage": None, "error": {"code": "server_error", "message": str(error)}}
        return self._event("error", code=error.code, message=str(error), param=None) + self._event(
            "response.failed", response=self._base | failed
        )

    @property
    def _status(self) -> str:
        return "incomplete" if self._length else "completed"

    def _take(self, output: RequestOutput) -> str:
        [completion] = output.outputs
        self._usage.add(output)
        self._text += completion.text
        self._length = completion.finish_reason is FinishReason.LENGTH
        return completion.text

    def _response(self) -> dict[str, Any]:
        usage = self._usage
        return self._base | {
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._length else None,
            "output": [self._item(self._status)],
            "usage": {
                "input_tokens": usage.num_prompt,
                "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
                "output_tokens": usage.num_completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.num_prompt + usage.num_completion,
            },
        }

    def _item(self, status: str) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": [self._part(self._text)]}

    @staticmethod
    def _part(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": []}

    def _event(self, name: str, **fields: Any) -> str:
        self._number += 1
        return event(json.dumps({"type": name, "sequence_number": self._number} | fields), name)
