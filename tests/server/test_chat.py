"""/v1/chat/completions by the real client."""

from __future__ import annotations

import openai
import pytest

MESSAGES = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello 😀"}]}]


def test_a_stream_has_roles_indices_and_reasons(client: openai.OpenAI) -> None:
    given = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 30, "seed": 5, "n": 3, "stop": "e"}
    whole = client.chat.completions.create(**given)
    roles, texts, reasons = [[], [], []], [""] * 3, [None] * 3
    for chunk in client.chat.completions.create(**given, stream=True):
        [choice] = chunk.choices
        if choice.delta.role:
            roles[choice.index].append(choice.delta.role)
        assert reasons[choice.index] is None
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
    assert roles == [["assistant"]] * 3
    assert texts == [c.message.content for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices] and set(reasons) <= {"stop", "length"}


def test_the_developer_is_the_system_and_parts_are_text(client: openai.OpenAI) -> None:
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello 😀"}]
    answers = {
        client.chat.completions.create(model="tiny", messages=m, temperature=0, max_tokens=9).choices[0].message.content
        for m in (MESSAGES, plain)
    }
    assert len(answers) == 1


def test_logprobs_have_bytes_that_make_the_text(client: openai.OpenAI) -> None:
    given = {"model": "tiny", "messages": MESSAGES, "max_tokens": 25, "seed": 2, "logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(**given, extra_body={"ignore_eos": True}).choices[0]
    assert len(choice.logprobs.content) == 25 and all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    data = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    special = {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}
    if not special & {entry.token for entry in choice.logprobs.content}:
        assert data.decode(errors="replace") == choice.message.content
    streamed = []
    for chunk in client.chat.completions.create(**given, stream=True, extra_body={"ignore_eos": True}):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == choice.logprobs.content


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"), ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, None), ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"top_logprobs": 2}, "top_logprobs"), ({"modalities": ["audio"]}, "modalities"), ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "functions"), ({"logprobs": 3}, "logprobs"), ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "web"}]}, "tools"), ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, None), ({"web_search_options": {"a": 1}}, "web_search_options"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(client: openai.OpenAI, body: dict[str, object], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=body)
    if param is not None:
        assert caught.value.param == param


def test_harmless_values_of_missing_fields_pass(client: openai.OpenAI) -> None:
    extra = {"modalities": ["text"], "web_search_options": None, "functions": []}
    assert client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, extra_body=extra).choices
