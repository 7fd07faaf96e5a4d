"""Outputs bound to grammars, drawn at random by a model that knows no JSON: they parse and fit, however they came about."""

from __future__ import annotations

import asyncio
import json
import re

import jsonschema_rs
import openai
import pytest

from tests.helpers.serving import Running, running, tiny_engine

SCHEMAS = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": ["s", "m", "l"]}}, "required": ["name", "size"],
     "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "minItems": 1, "maxItems": 4},
    {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}}, "required": ["b"],
     "additionalProperties": False}}, "required": ["a"], "additionalProperties": False},
    {"type": "string", "pattern": "^\"\\\\[a-z]{1,3}😀$"},
    {"anyOf": [{"const": "only"}, {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False}]},
]  # fmt: skip


def body(i: int, **others: object) -> dict[str, object]:
    schema = SCHEMAS[i % len(SCHEMAS)]
    format = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    messages = [{"role": "user", "content": f"Number {i // 8}"}]
    return {"model": "tiny", "messages": messages, "response_format": format, "seed": i, "temperature": 1, "max_tokens": 120} | others


def fits(i: int, text: str, reason: str) -> bool:
    """Whether it is valid; one that was cut is none of our business."""
    if reason == "length":
        return False
    assert reason == "stop"
    jsonschema_rs.validate(SCHEMAS[i % len(SCHEMAS)], json.loads(text))
    assert not re.search(r"[:,\[{] |\n", re.sub(r'"(\\.|[^"\\])*"', '""', text)), "white space that is not needed"
    return True


def test_200_seeded_outputs_parse_and_fit_under_preemption_with_samples_and_streamed() -> None:
    async def main(server: Running) -> list[list[str]]:
        async with server.async_client() as client:

            async def one(i: int) -> list[str]:
                n = 1 + i % 2
                if i % 3:
                    made = await client.chat.completions.create(**body(i, n=n))
                    found = [(c.message.content, c.finish_reason) for c in made.choices]
                else:
                    texts, reasons = [""] * n, [""] * n
                    async for chunk in await client.chat.completions.create(**body(i, n=n), stream=True):
                        for choice in chunk.choices:
                            texts[choice.index] += choice.delta.content or ""
                            reasons[choice.index] = choice.finish_reason or ""
                    found = [*zip(texts, reasons, strict=True)]
                return [text for text, reason in found if fits(i, text, reason)]

            return await asyncio.gather(*map(one, range(200)))

    with running(tiny_engine(num_blocks=24)) as server:
        crowded = asyncio.run(main(server))
        assert server.stats()["num_preemptions"] > 0
    assert sum(map(len, crowded)) > 200
    with running(tiny_engine(num_blocks=400, max_num_seqs=2)) as server:
        assert asyncio.run(main(server)) == crowded


def test_guided_fields_bind_completions(client: openai.OpenAI) -> None:
    def make(seed: int, **extra: object) -> str:
        made = client.completions.create(model="tiny", prompt="x", max_tokens=60, seed=seed, extra_body=extra)
        assert made.choices[0].finish_reason == "stop"
        return made.choices[0].text

    choices = ["yes", "no", 'may "be"\n', "漢字"]
    assert len({make(seed, guided_choice=choices) for seed in range(12)}) > 1
    assert all(make(seed, guided_choice=choices) in choices for seed in range(6))
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", make(1, guided_regex="[0-9]{3}-[a-f]{2}"))
    assert re.fullmatch(r"(ab)+", make(1, guided_grammar='start: "ab" | "ab" start'))
    assert json.loads(make(1, guided_json=SCHEMAS[1]))


def test_json_objects_and_responses(client: openai.OpenAI) -> None:
    bias = {"extra_body": {"logit_bias": {}}}
    made = client.chat.completions.create(**body(0, response_format={"type": "json_object"}, max_tokens=3), **bias)
    assert made.choices[0].message.content.startswith("{")
    format = {"type": "json_schema", "name": "it", "schema": SCHEMAS[1]}
    answer = client.responses.create(model="tiny", input="x", text={"format": format}, max_output_tokens=100)
    jsonschema_rs.validate(SCHEMAS[1], json.loads(answer.output_text))


def test_forced_calls_are_calls(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[0]}} for name in ("first", "second")]
    given = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": tools, "max_tokens": 150}
    named = {"type": "function", "function": {"name": "second"}}
    for seed in range(4):
        choice = client.chat.completions.create(**given, tool_choice="required", seed=seed).choices[0]
        [call] = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and call.function.name in ("first", "second") and not choice.message.content
        jsonschema_rs.validate(SCHEMAS[0], json.loads(call.function.arguments))
        calls = [
            t for chunk in client.chat.completions.create(**given, tool_choice=named, seed=seed, stream=True)
            for t in chunk.choices[0].delta.tool_calls or ()
        ]  # fmt: skip
        assert [call.function.name for call in calls] == ["second"]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"guided_regex": "a(b"}, "guided_regex"), ({"guided_grammar": "start: foo"}, "guided_grammar"), ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": {"type": "nope"}}, "guided_json"), ({"guided_json": {"not": {}}}, "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format"), ({"response_format": {"type": "xml"}}, "response_format"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"), ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "beam_width": 2}, "beam_width"), ({"guided_regex": "a" * 2**19}, "guided_regex"),
        ({"tool_choice": "required"}, "tool_choice"), ({"guided_json": {"$ref": "http://127.0.0.1:1/x"}}, "guided_json"),
    ],
)  # fmt: skip
def test_bad_grammars_are_refused_and_cost_nothing(client: openai.OpenAI, extra: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=4, extra_body=extra)
    assert caught.value.param == param and len(str(caught.value)) < 1500
    assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices
