"""What clients send: the bodies of OpenAI's API, and what they mean as ``SamplingParams``.

A field that is declared here has an effect. Of the others, those of ``NO_EFFECT`` are accepted, since leaving them out changes nothing
a client could miss; those of ``MISSING`` are refused, since their effect would be missed; unknown ones are ignored and logged once.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from octavo.errors import InvalidRequestError
from octavo.request import MAX_BEST_OF, MAX_LOGPROBS, Constraint, SamplingParams
from octavo.text.grammar import GrammarSource, choice_grammar, json_grammar

logger = logging.getLogger(__name__)

NO_EFFECT = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction",
    "reasoning_effort", "reasoning", "verbosity", "spaces_between_special_tokens", "request_id",
})  # fmt: skip

MISSING = {
    "audio": "this model makes text only",
    "background": "an answer comes with its request",
    "bad_words": "give forbidden_token_ids, or logit_bias",
    "chat_template": "a template comes from the model alone",
    "continue_final_message": "send the prompt's text to /v1/completions instead",
    "conversation": "nothing is stored; send the whole conversation as input",
    "documents": "put them into a message",
    "function_call": "it is the old form of tool_choice; use that",
    "functions": "it is the old form of tools; use these",
    "include_stop_str_in_output": "append the choice's stop_reason yourself",
    "include": "leave it out",
    "logits_processors": "no code of clients is run",
    "max_tool_calls": "tools are run by the client",
    "prompt": "give input instead",
    "previous_response_id": "nothing is stored; send the whole conversation as input",
    "skip_special_tokens": "special tokens are never part of the text",
    "suffix": "this model completes prompts at their end only",
    "truncate_prompt_tokens": "shorten the prompt",
    "truncation": "shorten the input",
    "use_beam_search": "give beam_width instead",
    "web_search_options": "there is no web search",
}
_HARMLESS = {"skip_special_tokens": (None, True), "include_stop_str_in_output": (None, False), "modalities": (None, ["text"]),
             "truncation": (None, "disabled"), "include": (None, []), "background": (None, False)}  # fmt: skip

_seen_unknown: set[str] = set()

T = TypeVar("T")


def _not_many(value: T) -> T:
    if isinstance(value, dict) and len(value) > _MAX_BIASES:
        raise ValueError(f"at most {_MAX_BIASES} entries are taken, not {len(value)}")
    return value


_MAX_BIASES = 4096
Several = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong entry ends its checking: a million wrong ones would otherwise become a million errors."""
Int32 = Annotated[int, Field(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenIds = Several[Int32]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: bool = False
    """Send the usage in a last chunk, without choices."""


class Body(BaseModel):
    """Any request: types are strict, so that "1" is no number, and NaN is none either."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def check_extra(self) -> None:
        """Refuse known fields whose effect would be missed; log unknown ones, each once."""
        for name, value in (self.model_extra or {}).items():
            if name in MISSING or name in _HARMLESS:
                if value not in _HARMLESS.get(name, (None, False, "", [], {})):
                    why = MISSING.get(name, "this model makes text only")
                    raise InvalidRequestError(f"{name} is not supported: {why}")
            elif name not in NO_EFFECT and name not in _seen_unknown and len(_seen_unknown) < 1000:
                _seen_unknown.add(name)
                logger.warning("a request has the field %.100r, which is not known and ignored (logged once)", name)


class Sampling(Body):
    """The fields that choose tokens; None is the default of ``SamplingParams``."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_not_many)] | None = None
    allowed_token_ids: TokenIds | None = None
    forbidden_token_ids: TokenIds | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    min_tokens: Int32 | None = None
    stop: str | Annotated[Several[str], Field(max_length=64)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_BEST_OF)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_BEST_OF)] | None = None
    beam_width: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    length_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    cache_prefix: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    guided_json: dict[str, Any] | None = None
    """JSON schema that the output fits."""
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    guided_choice: Annotated[Several[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=4096)] | None = None
    guided_grammar: Annotated[str, Field(min_length=1)] | None = None
    """A Lark grammar, as llguidance has it."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def params(self, max_tokens: int | None, logprobs: int | None, **others: Any) -> SamplingParams:
        """These fields as parameters of the engine."""
        self.check_extra()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is for streams: set stream to true, or leave it out")
        given = {name: value for name in _PLAIN if (value := getattr(self, name)) is not None}
        if self.beam_width is not None:
            given.setdefault("temperature", 0.0)
        given |= others
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, logit_bias=_token_biases(self.logit_bias), **given)

    def grammars(self) -> list[GrammarSource]:
        """What the output is bound to; at most one makes sense."""
        found = []
        if self.guided_json is not None:
            found.append(json_grammar(self.guided_json, "guided_json"))
        if self.guided_regex is not None:
            found.append(GrammarSource("regex", self.guided_regex, "guided_regex"))
        if self.guided_choice is not None:
            found.append(choice_grammar(self.guided_choice, "guided_choice"))
        if self.guided_grammar is not None:
            found.append(GrammarSource("lark", self.guided_grammar, "guided_grammar"))
        return found

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


_PLAIN = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "allowed_token_ids",
    "forbidden_token_ids", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "prompt_logprobs", "n", "best_of", "beam_width",
    "length_penalty", "early_stopping", "cache_salt", "cache_prefix", "priority",
)  # fmt: skip


def _token_biases(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    bad = next((key for key in given if not (key.isascii() and key.isdigit() and len(key) < 10)), None)
    if bad is not None:
        raise InvalidRequestError(f"logit_bias has the key {bad[:40]!r}; keys are token ids, such as '42'")
    return {int(key): value for key, value in given.items()}


class CompletionRequest(Sampling):
    """Body of /v1/completions."""

    prompt: str | Several[str] | TokenIds | Several[TokenIds]
    max_tokens: Int32 | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    def to_params(self, constraint: Constraint | None) -> SamplingParams:
        """With ``max_tokens=0``, which scores a prompt, one token is computed and not shown; ``echo`` scores the prompt too."""
        others: dict[str, Any] = {"constraint": constraint}
        if self.echo and self.logprobs is not None:
            others["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        if self.max_tokens == 0:
            others["min_tokens"] = 0
        return self.params(1 if self.max_tokens == 0 else self.max_tokens, self.logprobs, **others)


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    text: str | None = None


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: str
    arguments: str = "{}"
    """JSON, as text."""


class ToolCall(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Several[ContentPart] | None = None
    name: str | None = None
    tool_calls: Several[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionSpec(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: str


class NamedTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", serialize_by_alias=True)
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(BaseModel):
    """As /v1/chat/completions has it, with the schema in ``json_schema``; or as /v1/responses has it, with the schema beside the type."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    def grammar(self, field: str) -> GrammarSource | None:
        """The grammar of this format; None for text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return json_grammar({"type": "object"}, field)
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        if schema is None:
            raise InvalidRequestError(f"{field} is of type json_schema and has no schema")
        return json_grammar(schema, field)


class ChatRequest(Sampling):
    """Body of /v1/chat/completions."""

    messages: Annotated[Several[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """The old name of max_completion_tokens."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Several[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""

    def to_params(self, constraint: Constraint | None) -> SamplingParams:
        """The shorter of the two limits holds where both are given."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: set logprobs to true, or leave top_logprobs out")
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        return self.params(min(limits, default=None), (self.top_logprobs or 0) if self.logprobs else None, constraint=constraint)

    def grammars(self) -> list[GrammarSource]:
        found = super().grammars()
        if self.response_format is not None and (grammar := self.response_format.grammar("response_format")) is not None:
            found.append(grammar)
        return found


class InputItem(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Several[ContentPart]


class TextConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    format: ResponseFormat | None = None


class ResponsesRequest(Sampling):
    """Body of /v1/responses."""

    input: str | Annotated[Several[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    metadata: dict[str, str] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    """Tools are for /v1/chat/completions; here the list must be empty."""

    def to_params(self, constraint: Constraint | None) -> SamplingParams:
        """One answer of text."""
        for name in ("n", "best_of", "beam_width", "prompt_logprobs"):
            if getattr(self, name) not in (None, 1 if name != "prompt_logprobs" else None):
                raise InvalidRequestError(f"{name} is not supported for responses; use /v1/chat/completions")
        return self.params(self.max_output_tokens, None, constraint=constraint)

    def grammars(self) -> list[GrammarSource]:
        found = super().grammars()
        format = self.text.format if self.text is not None else None
        if format is not None and (grammar := format.grammar("text")) is not None:
            found.append(grammar)
        return found

    @property
    def messages(self) -> list[ChatMessage]:
        """The conversation, instructions first."""
        first = [ChatMessage(role="system", content=self.instructions)] if self.instructions is not None else []
        if isinstance(self.input, str):
            return [*first, ChatMessage(role="user", content=self.input)]
        return first + [ChatMessage(role=item.role, content=item.content) for item in self.input]


class TokenizeRequest(Body):
    """Body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Several[ChatMessage] | None = None
    add_special_tokens: bool = True
    """Add what the model expects at a prompt's start, such as BOS; for a prompt only."""
    add_generation_prompt: bool = True


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: TokenIds
