"""Chat messages to one prompt, by the template that comes with a model.

Templates are untrusted code from wherever the model came from: they run in Jinja's sandbox, see plain data only, and
have the few helpers that transformers gives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequestError, ModelLoadError
from octavo.text.tokenizer import read_tokenizer_config

if TYPE_CHECKING:
    import jinja2

MAX_OUTPUT = 16 * 2**20
"""Most characters of a rendered prompt."""
_MAX_PRODUCT = 2**20
"""Most elements that ``*`` may make of a text or list, and most bits of a number that ``*`` or ``**`` may make."""


class ChatTemplate:
    """A chat template, compiled when it is first needed: who completes text does not wait for it."""

    def __init__(self, source: str, bos_token: str | None = None, eos_token: str | None = None) -> None:
        self.source = source
        self.tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}

    @cached_property
    def compiled(self) -> jinja2.Template:
        """Raises ``ModelLoadError`` where the source is not a Jinja template."""
        from jinja2 import TemplateError

        try:
            return _environment().from_string(self.source)
        except (TemplateError, RecursionError) as error:
            raise ModelLoadError(f"the model's chat template is not usable: {error}") from error

    def compile(self) -> None:
        """Do it now, for a server that had better not start than fail at its first conversation; raises as ``compiled``."""
        self.compiled  # noqa: B018

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], bos_token: str | None, eos_token: str | None) -> ChatTemplate | None:
        """The template of a GGUF file; None where it has none."""
        source = metadata.get("tokenizer.chat_template")
        return cls(source, bos_token, eos_token) if isinstance(source, str) else None

    @classmethod
    def from_directory(cls, path: Path, bos_token: str | None, eos_token: str | None) -> ChatTemplate | None:
        """The template of a model directory: chat_template.jinja, or else tokenizer_config.json; None where there is none."""
        file = path / "chat_template.jinja"
        if file.is_file():
            return cls(file.read_text("utf-8", "replace"), bos_token, eos_token)
        source = read_tokenizer_config(path).get("chat_template")
        if isinstance(source, list):  # several templates, by name
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        return cls(source, bos_token, eos_token) if isinstance(source, str) else None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """Return the prompt, special tokens included: encode it with ``add_special_tokens=False``.

        ``messages`` are objects with a role and content, as in OpenAI's API; ``variables`` reach the template too (tools, ...).
        Raises ``InvalidRequestError`` for messages that are not of that form, or that the template refuses, ``ModelLoadError`` as ``compiled`` does.
        """
        template, checked = self.compiled, check_messages(messages)
        given = {"tools": None, "documents": None} | self.tokens | {name: _plain(value) for name, value in variables.items()}
        parts, size = [], 0
        try:
            for part in template.generate(messages=checked, add_generation_prompt=add_generation_prompt, **given):
                size += len(part)
                if size > MAX_OUTPUT:
                    raise InvalidRequestError(f"it makes more than {MAX_OUTPUT} characters of them")
                parts.append(part)
            return "".join(parts)
        except MemoryError as error:
            raise InvalidRequestError("the model's chat template needs too much memory for these messages") from error
        except Exception as error:  # a template can fail in any way that Python can
            raise InvalidRequestError(f"the model's chat template refused the messages: {error}") from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as plain data; raises ``InvalidRequestError`` naming the one that is wrong."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages must be a list of at least one {'role': ..., 'content': ...}")
    return [_check_message(i, message) for i, message in enumerate(messages)]


def _check_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"messages[{index}] must be an object with role and content, not {type(message).__name__}")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidRequestError(f"messages[{index}].role must be text such as 'system', 'user' or 'assistant'")
    content = message.get("content")
    if content is None and not any(message.get(key) for key in ("tool_calls", "function_call", "reasoning_content")):
        raise InvalidRequestError(f"messages[{index}].content is missing; give it text")
    parts_ok = isinstance(content, list) and all(isinstance(part, Mapping) and "type" in part for part in content)
    if content is not None and not isinstance(content, str) and not parts_ok:
        raise InvalidRequestError(f"messages[{index}].content must be text or a list of parts with a type, not {type(content).__name__}")
    return {str(key): _plain(value) for key, value in message.items() if value is not None}


def _plain(value: Any) -> Any:
    """Rebuild a value from JSON's types alone, so that a template gets hold of no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise InvalidRequestError(f"a chat message can hold text, numbers, lists and objects, not {type(value).__name__}")


def _environment() -> jinja2.Environment:
    """What transformers gives to templates: block trimming, loop controls, tojson without HTML escapes, two functions."""
    from jinja2 import pass_context
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Guarded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _product_size(operator, left, right) > _MAX_PRODUCT:
                raise InvalidRequestError(f"{operator} would make something huge")
            return super().call_binop(context, operator, left, right)

    # Nothing may be computed when the template is compiled: it could be '%9999999999d' | format(1).
    environment = Guarded(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation_tag(), loopcontrols],
        optimized=False,
        finalize=pass_context(_as_it_is),
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _product_size(operator: str, left: Any, right: Any) -> float:
    """Elements, or bits, of what ``*`` or ``**`` would make of two values; an upper bound."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(other, int):
            return len(one) * other
    return 0


def _generation_tag() -> Any:
    """``{% generation %} ... {% endgeneration %}`` marks what the assistant said, for training; here it is just its body."""
    from jinja2 import nodes, parser
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 - as the base class declares it

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    return GenerationTag


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _as_it_is(context: Any, value: Any) -> Any:
    return value


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
