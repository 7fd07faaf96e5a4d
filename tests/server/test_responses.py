"""/v1/responses by the real client."""

from __future__ import annotations

import openai
import pytest

from octavo.config import ServerConfig
from tests.helpers.serving import Running, running, tiny_engine


def test_an_answer_is_the_one_of_a_chat(client: openai.OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Hello 😀"}]}]
    given = {"model": "tiny", "instructions": "Be brief.", "max_output_tokens": 20, "extra_body": {"seed": 4, "ignore_eos": True}}
    answer = client.responses.create(input=parts, **given)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello 😀"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=20, seed=4, extra_body={"ignore_eos": True})
    assert answer.output_text == chat.choices[0].message.content == client.responses.create(input="Hello 😀", **given).output_text
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 20 and answer.usage.input_tokens == chat.usage.prompt_tokens


def test_a_stream_tells_the_whole_story_in_order(client: openai.OpenAI) -> None:
    given = {"model": "tiny", "input": "Hello 😀", "max_output_tokens": 40, "extra_body": {"seed": 1, "stop": "e"}}
    whole = client.responses.create(**given)
    events = list(client.responses.create(**given, stream=True))
    names = [e.type.removeprefix("response.") for e in events if e.type != "response.output_text.delta"]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert names == ["created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
                     "output_item.done", whole.status]  # fmt: skip
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text and last.usage.output_tokens == whole.usage.output_tokens
    with client.responses.stream(**{**given, "extra_body": {"seed": 1, "stop": "e"}}) as stream:
        assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == whole.output_text


@pytest.mark.parametrize("body", [
    {"previous_response_id": "resp_1"}, {"tools": [{"type": "web_search"}]}, {"input": []}, {"n": 2}, {"background": True},
    {"include": ["message.output_text.logprobs"]}, {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
    {"conversation": "c"}, {"text": {"format": {"type": "json_schema"}}}, {"truncation": "auto"},
])  # fmt: skip
def test_what_is_missing_is_refused_by_name(client: openai.OpenAI, body: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="x", extra_body=body)
    assert caught.value.param == next(iter(body))


def test_a_failure_in_the_middle_is_an_event() -> None:
    with running(tiny_engine(), ServerConfig(request_timeout=0.2)) as server, server.client() as client:
        slow_down(server)
        events = list(client.responses.create(model="tiny", input="x", stream=True, extra_body={"ignore_eos": True}))
        assert [e.type for e in events[-2:]] == ["error", "response.failed"] and "server's limit" in events[-2].message


def slow_down(server: Running) -> None:
    import time

    runner = server.service.engine.text.core._runner
    execute = runner.execute
    runner.execute = lambda plan: (time.sleep(0.02), execute(plan))[1]
