"""Calls of tools: parsers on what models have written, cut anywhere; definitions in the prompt; the client's view."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import openai
import pytest

from octavo.server.tools import create_parser, detect_parser, messages_with_tools
from octavo.text.chat_template import ChatTemplate
from tests.helpers.serving import Running

WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris", "note": "a < b </tool> \\"q\\" 😀"}}'
TIME = '{"name": "get_time", "arguments": {}}'

# kind, what the model wrote, content, names of calls
RECORDED = [
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", "", ["get_weather"]),
    ("hermes", f"Let me look.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{TIME}\n</tool_call>\n", "Let me look.\n",
     ["get_weather", "get_time"]),
    ("hermes", f"<tool_call>{WEATHER}", "", ["get_weather"]),
    ("hermes", "I cannot <tool_> do < that.", "I cannot <tool_> do < that.", []),
    ("hermes", "<tool_call>\nno json\n</tool_call>", "<tool_call>\nno json\n", []),
    ("hermes", f"{WEATHER[:-4]}", WEATHER[:-4], []),
    ("hermes", f"<tool_call>{WEATHER[:-4]}", f"<tool_call>{WEATHER[:-4]}", []),
    ("llama3", WEATHER.replace("arguments", "parameters"), "", ["get_weather"]),
    ("llama3", f"<|python_tag|>{WEATHER}; {TIME}", "", ["get_weather", "get_time"]),
    ("llama3", '{"name": "get_weather"', '{"name": "get_weather"', []),
    ("llama3", '{"colour": "red"}', '{"colour": "red"}', []),
    ("llama3", "Hello {there}.", "Hello {there}.", []),
    ("llama3", "", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "content", "names"), RECORDED)
def test_parsers_see_the_same_however_the_text_is_cut(kind: str, text: str, content: str, names: list[str]) -> None:
    for size in (1, 2, 3, 7, 1000):
        parser = create_parser(kind, several=True)
        found, calls = "", []
        for start in range(0, len(text), size):
            more, new = parser.push(text[start : start + size])
            found, calls = found + more, calls + new
        more, new = parser.finish()
        calls += new
        assert found + more == content and [call.name for call in calls] == names
        assert [call.number for call in calls] == list(range(len(names))) and parser.num_calls == len(names)
        for call in calls:
            assert json.loads(call.arguments) == json.loads(WEATHER if call.name == "get_weather" else TIME)["arguments"]


def test_without_parallel_calls_only_the_first_counts() -> None:
    parser = create_parser("hermes", several=False)
    _, calls = parser.push(f"<tool_call>{WEATHER}</tool_call><tool_call>{TIME}</tool_call>")
    assert [call.name for call in calls + parser.finish()[1]] == ["get_weather"]


def test_the_parser_follows_from_the_template() -> None:
    assert detect_parser(None) == detect_parser(ChatTemplate("{{ '<tool_call>' }}")) == "hermes"
    assert detect_parser(ChatTemplate("{{ '<|python_tag|>' }}")) == "llama3"


TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": {"type": "object"}}}


def test_definitions_go_where_the_template_has_a_place_or_into_the_system_message() -> None:
    user = {"role": "user", "content": "Weather?"}
    own = ChatTemplate("{{ tools }}")
    assert messages_with_tools([user], [TOOL], own) == ([user], [TOOL])
    plain = ChatTemplate("{{ messages }}")
    messages, left = messages_with_tools([user], [TOOL], plain)
    assert left == [] and messages[1] == user and json.dumps(TOOL) in messages[0]["content"]
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    history = [
        {"role": "system", "content": "Be brief."}, user, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]  # fmt: skip
    messages, _ = messages_with_tools(history, [TOOL], plain)
    assert messages[0]["content"].startswith("Be brief.\n\n# Tools") and len(messages) == 4
    assert messages[2]["content"] == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert messages[3] == {"role": "user", "content": "<tool_response>\nrain\n</tool_response>"}


@contextmanager
def scripted(server: Running, text: str) -> Iterator[None]:
    """Make the model say ``text``, and then end."""
    script = server.service.engine.text.tokenizer.encode(text, add_special_tokens=False)
    runner = server.service.engine.text.core._runner
    execute = runner.execute
    said: dict[int, int] = {}

    def speak(plan: object) -> object:
        result = execute(plan)
        tokens = []
        for request_id, count in zip(plan.request_ids, plan.sampled, strict=True):
            for _ in range(count):
                at = said[request_id] = said.get(request_id, -1) + 1
                tokens.append(script[at] if at < len(script) else 2)
        return replace(result, token_ids=array("i", tokens))

    runner.execute = speak
    try:
        yield
    finally:
        runner.execute = execute


def test_calls_reach_the_client_whole_and_streamed(server: Running, client: openai.OpenAI) -> None:
    given = {"model": "tiny", "messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL], "max_tokens": 150}
    with scripted(server, f"Let me look. <tool_call>\n{WEATHER}\n</tool_call>"):
        choice = client.chat.completions.create(**given).choices[0]
        chunks = list(client.chat.completions.create(**given, stream=True))
        off = client.chat.completions.create(**given, tool_choice="none").choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look. "
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == json.loads(WEATHER)["arguments"]
    deltas = [c.choices[0].delta for c in chunks]
    assert "".join(d.content or "" for d in deltas) == "Let me look. "
    streamed = [t for d in deltas for t in d.tool_calls or ()]
    assert [t.index for t in streamed] == [0] and streamed[0].id
    assert (streamed[0].function.name, streamed[0].function.arguments) == (call.function.name, call.function.arguments)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert off.finish_reason == "stop" and "<tool_call>" in off.message.content and not off.message.tool_calls


def test_a_conversation_with_results_goes_on(server: Running, client: openai.OpenAI) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]  # fmt: skip
    assert client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL], max_tokens=3).choices
    call["function"]["arguments"] = "{"
    with pytest.raises(openai.BadRequestError, match="not JSON"):
        client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL])
