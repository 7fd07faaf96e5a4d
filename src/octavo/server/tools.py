"""Tools: their definitions into the prompt, the model's calls out of its text.

Two ways of writing a call are understood:

    hermes   <tool_call>{"name": "f", "arguments": {...}}</tool_call>   anywhere in the text, as Hermes and Qwen models do
    llama3   {"name": "f", "parameters": {...}}                         as the whole answer, several separated by ';'
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol

from octavo.errors import InvalidRequestError
from octavo.server.protocol import ChatRequest, NamedTool
from octavo.text.grammar import GrammarSource, json_grammar

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}
_PYTHON_TAG = "<|python_tag|>"

_INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class Template(Protocol):
    """A chat template."""

    source: str


class ToolCallText(NamedTuple):
    """A call that the model has written."""

    number: int
    """From 0, within an answer."""
    name: str
    arguments: str
    """JSON."""


class CallParser(Protocol):
    """Takes a text as it comes, gives content and calls."""

    num_calls: int

    def push(self, text: str) -> tuple[str, list[ToolCallText]]:
        """Take new text; returns the content that is now certain, and the calls that are complete."""

    def finish(self) -> tuple[str, list[ToolCallText]]:
        """The text has ended; returns the rest."""


def wants_tools(body: ChatRequest) -> bool:
    """Whether the model may call tools."""
    return bool(body.tools) and body.tool_choice != "none"


def forced_calls(body: ChatRequest, kind: str) -> list[GrammarSource]:
    """The grammar of an answer that must be a call, for ``tool_choice`` required or named; empty for others."""
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return []
    tools = [tool.function for tool in body.tools or ()]
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.name == choice.function.name]
    if not tools:
        wanted = f"the function {choice.function.name[:100]!r}" if isinstance(choice, NamedTool) else "a call"
        raise InvalidRequestError(f"tool_choice wants {wanted}, which is not among tools")
    key = "parameters" if kind == "llama3" else "arguments"
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: tool.parameters or {"type": "object"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if kind == "llama3":
        return [json_grammar(schema, "tool_choice")]
    text = f'start: "{_OPEN}\\n" call "\\n{_CLOSE}"\ncall: %json {json.dumps(schema | _COMPACT)}'
    return [GrammarSource("lark", text, "tool_choice")]


def detect_parser(template: Template | None) -> str:
    """How a model writes its calls, from its chat template."""
    source = "" if template is None else template.source
    return "llama3" if _PYTHON_TAG in source or ('"parameters"' in source and _OPEN not in source) else "hermes"


def create_parser(kind: str, several: bool) -> CallParser:
    """A parser of calls; without ``several`` all but the first are dropped."""
    return Llama3Parser(several) if kind == "llama3" else HermesParser(several)


def messages_with_tools(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], template: Template | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools for the template; where it has no place for tools, they and their results become plain text."""
    if template is not None and "tools" in template.source:
        return messages, tools
    messages = [_without_tools(message) for message in messages]
    if tools:
        text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if messages[0]["role"] == "system":
            messages[0] = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}
        else:
            messages.insert(0, {"role": "system", "content": text})
    return messages, []


def _without_tools(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [json.dumps(_named(call["function"]), ensure_ascii=False) for call in message.get("tool_calls", ())]
    parts = [message["content"]] if message["content"] else []
    return {"role": message["role"], "content": "\n".join(parts + [f"{_OPEN}\n{call}\n{_CLOSE}" for call in calls])}


def _named(function: dict[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": function["arguments"]}


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call written as JSON; None if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return value["name"], arguments
    return value["name"], json.dumps(arguments, ensure_ascii=False)


class _Calls:
    """Numbers the calls of one answer."""

    def __init__(self, several: bool) -> None:
        self.num_calls = 0
        self._several = several

    def _made(self, name: str, arguments: str) -> list[ToolCallText]:
        if self.num_calls and not self._several:
            return []
        self.num_calls += 1
        return [ToolCallText(self.num_calls - 1, name, arguments)]


class HermesParser(_Calls):
    """
    text   content ... <tool_call> {"name": ... } </tool_call> ...
           given out   ^ held until the call is complete
    """

    def __init__(self, several: bool = True) -> None:
        super().__init__(several)
        self._held = ""

    def push(self, text: str) -> tuple[str, list[ToolCallText]]:
        self._held += text
        content, calls = "", list[ToolCallText]()
        while (start := self._held.find(_OPEN)) >= 0 and (end := self._held.find(_CLOSE, start)) >= 0:
            content += self._before(start)
            content, calls = self._take(self._held[start + len(_OPEN) : end], content, calls)
            self._held = self._held[end + len(_CLOSE) :]
        if start < 0:
            certain = len(self._held) - _overlap(self._held, _OPEN)
            if self.num_calls:
                certain = certain if self._held[:certain].strip() else 0
            content += self._held[:certain]
            self._held = self._held[certain:]
        elif start > 0:
            content += self._before(start)
            self._held = self._held[start:]
        return content, calls

    def finish(self) -> tuple[str, list[ToolCallText]]:
        held, self._held = self._held, ""
        if held.startswith(_OPEN):
            return self._take(held[len(_OPEN) :], "", [])
        return ("" if self.num_calls and not held.strip() else held), []

    def _before(self, start: int) -> str:
        """Content before a call; the white space between two calls is none."""
        text = self._held[:start]
        return text if text.strip() or not self.num_calls else ""

    def _take(self, text: str, content: str, calls: list[ToolCallText]) -> tuple[str, list[ToolCallText]]:
        """Add a call, or its text where that is none."""
        found = _read_call(text)
        if found is None:
            return content + _OPEN + text, calls
        return content, calls + self._made(*found)


class Llama3Parser(_Calls):
    """An answer that begins as JSON is held back to its end; then it is calls, or else content."""

    def __init__(self, several: bool = True) -> None:
        super().__init__(several)
        self._text = ""
        self._is_content = False

    def push(self, text: str) -> tuple[str, list[ToolCallText]]:
        if self._is_content:
            return text, []
        self._text += text
        begun = self._text.lstrip()
        if not begun or begun.startswith("{") or _PYTHON_TAG.startswith(begun[: len(_PYTHON_TAG)]):
            return "", []
        self._is_content = True
        return self._text, []

    def finish(self) -> tuple[str, list[ToolCallText]]:
        if self._is_content:
            return "", []
        rest = self._text.strip().removeprefix(_PYTHON_TAG).strip()
        calls: list[ToolCallText] = []
        decoder = json.JSONDecoder()
        while rest:
            try:
                _, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                break
            found = _read_call(rest[:end])
            if found is None:
                break
            calls += self._made(*found)
            rest = rest[end:].lstrip("; \n")
        if rest:
            self.num_calls = 0
            return self._text, []
        return "", calls


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``mark``."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
