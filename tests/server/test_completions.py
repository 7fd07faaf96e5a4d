"""/v1/completions by the real client."""

from __future__ import annotations

import json
import math

import httpx
import openai
import pytest

from tests.helpers.serving import Running

TEXT = "Emoji 😀 and 漢字: once upon a time"


def test_a_stream_concatenates_to_the_whole(client: openai.OpenAI) -> None:
    for seed in range(6):
        given = {"model": "tiny", "prompt": [TEXT, "ñandú"], "max_tokens": 60, "seed": seed, "n": 2, "stop": ["a", "的", "zz"]}
        whole = client.completions.create(**given)
        texts, reasons = [""] * 4, [None] * 4
        for chunk in client.completions.create(**given, stream=True):
            for choice in chunk.choices:
                assert reasons[choice.index] is None, "a choice goes on after its end"
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason
        assert texts == [c.text for c in whole.choices]
        assert reasons == [c.finish_reason for c in whole.choices]


def test_usage_counts_and_comes_last_in_a_stream(client: openai.OpenAI) -> None:
    given = {"model": "tiny", "prompt": TEXT * 2, "max_tokens": 7, "seed": 1, "n": 3, "extra_body": {"ignore_eos": True}}
    usage = client.completions.create(**given).usage
    assert usage is not None and usage.completion_tokens == 21 and usage.total_tokens == 21 + usage.prompt_tokens
    *chunks, last = client.completions.create(**given, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks) and not last.choices
    assert last.usage.prompt_tokens_details.cached_tokens > 0
    assert last.usage.model_dump(exclude={"prompt_tokens_details"}) == usage.model_dump(exclude={"prompt_tokens_details"})


def test_prompts_of_every_form(client: openai.OpenAI, server: Running) -> None:
    ids = server.service.engine.text.encode(TEXT)
    forms = [TEXT, [TEXT], ids, [ids]]
    texts = {client.completions.create(model="tiny", prompt=form, max_tokens=8, temperature=0).choices[0].text for form in forms}
    assert len(texts) == 1
    both = client.completions.create(model="tiny", prompt=[ids, ids[:3]], max_tokens=8, temperature=0)
    assert [c.index for c in both.choices] == [0, 1] and both.choices[0].text in texts


def test_logprobs_echo_and_scoring(client: openai.OpenAI, server: Running) -> None:
    prompt = "The end of the line"
    made = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0, logprobs=2)
    known = made.choices[0].logprobs
    assert len(known.tokens) == 4 and all(len(top) in (2, 3) for top in known.top_logprobs)
    # the same tokens scored as part of a prompt, without generating any
    ids = server.service.engine.text.encode(prompt)
    full = ids + [server.service.engine.text.tokenizer.backend.token_to_id(t.replace(" ", "Ġ")) for t in known.tokens]
    if None in full:
        pytest.skip("a token is spelled in bytes")
    scored = client.completions.create(model="tiny", prompt=full, max_tokens=0, echo=True, logprobs=2)
    assert scored.usage.completion_tokens == 0 and scored.choices[0].finish_reason == "length"
    columns = scored.choices[0].logprobs
    assert columns.token_logprobs[0] is None and len(columns.tokens) == len(full)
    assert columns.token_logprobs[-4:] == known.token_logprobs
    text = scored.choices[0].text
    for offset, token in zip(columns.text_offset, columns.tokens, strict=True):
        assert text[offset:].startswith(token)


def test_streamed_logprobs_and_echo_are_the_whole_ones(client: openai.OpenAI) -> None:
    given = {"model": "tiny", "prompt": TEXT, "max_tokens": 20, "seed": 3, "logprobs": 1, "echo": True}
    whole = client.completions.create(**given).choices[0]
    text, columns = "", {"tokens": [], "token_logprobs": [], "text_offset": []}
    for chunk in client.completions.create(**given, stream=True):
        text += chunk.choices[0].text
        for name, column in columns.items():
            column += getattr(chunk.choices[0].logprobs, name)
    assert text == whole.text and text.startswith(TEXT)
    assert columns == {name: getattr(whole.logprobs, name) for name in columns}


def test_prompt_logprobs(client: openai.OpenAI) -> None:
    made = client.completions.create(model="tiny", prompt=TEXT, max_tokens=1, extra_body={"prompt_logprobs": 1})
    entries = made.choices[0].model_extra["prompt_logprobs"]
    assert entries[0] is None and len(entries) == made.usage.prompt_tokens
    assert all(sum(math.exp(x["logprob"]) for x in entry.values()) <= 1 + 1e-5 for entry in entries[1:])


def test_extensions_have_their_effect(client: openai.OpenAI) -> None:
    def make(**extra: object) -> openai.types.Completion:
        return client.completions.create(model="tiny", prompt=TEXT, max_tokens=6, extra_body=extra)

    greedy = make(top_k=1).choices[0].text
    assert greedy == make(temperature=0).choices[0].text == make(min_p=1.0).choices[0].text
    assert make(beam_width=1).choices[0].text == greedy
    assert make(beam_width=4, n=2).choices[1].text is not None
    assert make(allowed_token_ids=[905]).choices[0].text == " world" * 6
    assert make(allowed_token_ids=[905], stop_token_ids=[905]).choices[0].model_extra["stop_reason"] == 905
    assert make(logit_bias={"905": 100}, temperature=0).choices[0].text == " world" * 6
    assert len(make(best_of=3, n=2).choices) == 2
    salted = make(cache_salt="tenant").usage.prompt_tokens_details.cached_tokens
    assert salted == 0 and make(cache_salt="tenant").usage.prompt_tokens_details.cached_tokens > 0
    assert make(cache_prefix=False).usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": "1"}, "temperature"), ({"temperature": -1}, "temperature"), ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0}, "top_p"), ({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": True}, "n"), ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"), ({"max_tokens": 10**6}, "max_tokens"), ({"logprobs": 65}, "logprobs"),
        ({"stop": [""]}, "stop"), ({"stop": 3}, "stop"), ({"stop": ["x"] * 65}, "stop"), ({"seed": 2**64}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"9999999": 1}}, "logit_bias"), ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"), ({"suffix": "x"}, "suffix"), ({"prompt": []}, "prompt"), ({"prompt": ""}, None),
        ({"prompt": [[]]}, None), ({"prompt": None}, "prompt"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [10**6]}, None),
        ({"prompt": ["a"] * 300}, "prompt"), ({"prompt": "word " * 700}, "prompt"), ({"stream_options": {"include_usage": True}}, None),
        ({"guided_json": {}, "prompt": "x", "temperature": 3, "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "\ud800"}, "prompt"), ({"beam_width": 2, "temperature": 1}, None), ({"top_k": 2**40}, "top_k"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(server: Running, body: dict[str, object], param: str | None) -> None:
    sent = json.dumps({"model": "tiny", "prompt": "x"} | body)
    reply = httpx.post(f"{server.url}/v1/completions", content=sent, headers={"content-type": "application/json"})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["type"] == "invalid_request_error" and error["message"]
    if param is not None:
        assert error["param"] == param


def test_too_long_a_prompt_has_openais_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="word " * 700)
    assert caught.value.code == "context_length_exceeded"


def test_fields_without_effect_and_unknown_ones_are_accepted(client: openai.OpenAI, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        client.completions.create(model="tiny", prompt="x", max_tokens=1, user="me", extra_body={"metadata": {"a": "b"}, "colour": "red"})
    assert [r.getMessage().count("'colour'") for r in caplog.records if "colour" in r.getMessage()] == [1]
