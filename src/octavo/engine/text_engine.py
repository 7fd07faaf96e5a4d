"""An engine with text on both ends: prompts in, outputs out, one step at a time. ``LLM`` and ``AsyncEngine`` drive it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.core import EngineCore, RequestUpdate
from octavo.engine.outputs import OutputProcessor, RequestOutput
from octavo.errors import InvalidRequestError
from octavo.limits import make_request
from octavo.request import FinishReason, SamplingParams
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""
Message = Mapping[str, Any]
"""One message of a chat: at least ``role`` and ``content``."""


class TextEngine:
    """Tokenizes prompts, steps the core, decodes its updates, ends requests at their stop strings."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        self._outputs = OutputProcessor(tokenizer)
        self._incremental: set[int] = set()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; a text gets the tokens that the model expects at its start."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
            raise InvalidRequestError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
        return [*prompt]

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        if self._chat_template is None:
            raise InvalidRequestError("this model has no chat template; use generate() with the prompt's text")
        return self.tokenizer.encode(self._chat_template.render(messages), add_special_tokens=False)

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise InvalidRequestError if this request would be refused."""
        make_request(0, token_ids, params, self.core.limits, 0.0)

    def add(self, prompt: Prompt | None, token_ids: Sequence[int], params: SamplingParams, incremental: bool) -> int:
        """Queue a request. Returns its id. With ``incremental``, each step that brings it tokens gives an output."""
        if incremental and params.beam_width is not None:
            raise InvalidRequestError(
                "beams cannot be streamed, as the best are known only at the end: leave beam_width out, or do not stream"
            )
        if incremental and params.num_samples > params.n:
            raise InvalidRequestError(
                f"best_of={params.best_of} cannot be streamed, as the best are known only at the end: leave best_of out, or do not stream"
            )
        request_id = self.core.add_request(token_ids, params)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.core.limits.eos_token_ids)
        self._outputs.add(request_id, prompt if isinstance(prompt, str) else None, token_ids, params, stop_ids, incremental)
        if incremental:
            self._incremental.add(request_id)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the outputs of requests that ended, and of incremental ones that got tokens."""
        touched: dict[int, None] = {}
        for update in self.core.step():
            stop = self._outputs.push(update)
            if stop is not None:
                self._push(self.core.finish(update.request_id, FinishReason.STOP, stop, update.sample_index))
            if update.finish_reason is not None or update.token_ids:
                touched[update.request_id] = None
        due = [i for i in touched if i in self._incremental or self._outputs.has_ended(i)]
        return [self._output(request_id) for request_id in due]

    def abort(self, request_id: int, sample_index: int | None = None) -> RequestOutput | None:
        """Give a request, or one sample of it, up. Returns the request's output so far, or None if it had ended before."""
        updates = self.core.abort(request_id, sample_index)
        if not updates and sample_index is None:
            self._incremental.discard(request_id)
            self._outputs.discard(request_id)
        self._push(updates)
        return self._output(request_id) if updates else None

    def _push(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            self._outputs.push(update)

    def _output(self, request_id: int) -> RequestOutput:
        if self._outputs.has_ended(request_id):
            self._incremental.discard(request_id)
        return self._outputs.output(request_id)
