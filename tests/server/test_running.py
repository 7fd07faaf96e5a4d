"""The server under load and in trouble: crowding, clients that leave, steps that fail or hang, strangers."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable

import httpx
import openai
import pytest

from octavo.config import ServerConfig
from tests.helpers.serving import Running, running, tiny_engine

PROMPTS = ["Once upon a time", "Emoji 😀 and 漢字", "Water is made of", "The capital of France is the city of light"]


def given(i: int, max_tokens: int = 24) -> dict[str, object]:
    extra = {"ignore_eos": True}
    return {"model": "tiny", "prompt": f"{PROMPTS[i % 4]} {i}", "max_tokens": max_tokens, "seed": i, "stop": "qz", "extra_body": extra}


async def all_texts(server: Running, count: int, stream: bool) -> list[str]:
    async with server.async_client() as client:

        async def one(i: int) -> str:
            if not stream:
                return (await client.completions.create(**given(i))).choices[0].text
            chunks = await client.completions.create(**given(i), stream=True)
            return "".join([c.choices[0].text async for c in chunks])

        return await asyncio.gather(*map(one, range(count)))


def test_a_crowd_of_200_in_a_pool_too_small_all_complete_with_the_unhurried_tokens() -> None:
    with running(tiny_engine(num_blocks=40), max_num_seqs=32) as server:
        crowded = asyncio.run(all_texts(server, 200, stream=False))
        assert server.stats()["num_preemptions"] > 0
    with running(tiny_engine(num_blocks=400, max_num_seqs=4), max_num_seqs=4) as server, server.client() as client:
        alone = [client.completions.create(**given(i)).choices[0].text for i in range(200)]
        assert server.stats()["num_preemptions"] == 0
    assert crowded == alone


def test_64_streams_at_once(server: Running) -> None:
    assert asyncio.run(all_texts(server, 64, stream=True)) == asyncio.run(all_texts(server, 64, stream=False))


def test_accepted_drafts_come_as_one_chunk_and_change_nothing(server: Running) -> None:
    few = {"ignore_eos": True, "allowed_token_ids": [300, 400, 500], "temperature": 0}
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 60, "logprobs": 1, "extra_body": few}

    def collect(server: Running) -> tuple[list[str], list[float | None], int]:
        """Tokens, log-probabilities, chunks."""
        with server.client() as client:
            chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**body, stream=True)]
            whole = client.completions.create(**body)
        found = [logprobs for logprobs in chunks if logprobs is not None]
        tokens, values = ([x for logprobs in found for x in getattr(logprobs, name)] for name in ("tokens", "token_logprobs"))
        assert whole.usage.completion_tokens == 60 and whole.choices[0].logprobs.tokens == tokens
        return tokens, values, len(found)

    with running(tiny_engine(speculative_tokens=6)) as speculating:
        *on, few_chunks = collect(speculating)
        metrics = httpx.get(f"{speculating.url}/metrics").text
    *off, many_chunks = collect(server)
    assert on == off and few_chunks < many_chunks
    counts = dict(line.split() for line in metrics.splitlines() if line.startswith("octavo_draft"))
    assert 0 < float(counts["octavo_draft_tokens_accepted_total"]) <= float(counts["octavo_draft_tokens_total"])


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def is_idle(server: Running) -> bool:
    stats = server.stats()
    return stats["blocks"]["used"] == stats["num_running"] == stats["num_waiting"] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_free_their_blocks(server: Running, stream: bool) -> None:
    chance = random.Random(0)

    async def main() -> None:
        async with server.async_client() as client:

            async def one(i: int) -> None:
                call = client.completions.create(**given(i, max_tokens=500), stream=stream, n=1 + i % 2)
                try:
                    await asyncio.wait_for(call if not stream else drain(call), chance.uniform(0.05, 0.6))
                except TimeoutError:
                    return

            await asyncio.gather(*map(one, range(40)))

    async def drain(call: object) -> None:
        async for _ in await call:
            pass

    asyncio.run(main())
    wait_until(lambda: is_idle(server), 10)
    assert not server.service.jobs


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_times_out_frees_its_blocks(stream: bool) -> None:
    with running(tiny_engine()) as server, server.client() as client:
        slow(server, 0.05)
        with pytest.raises((openai.APITimeoutError, httpx.ReadTimeout)):  # while it streams, the client does not translate its own
            answer = client.with_options(timeout=0.02).completions.create(**given(0, 500), stream=stream)
            list(answer)
        wait_until(lambda: is_idle(server), 10)


def test_a_full_queue_says_when_to_come_again() -> None:
    with running(tiny_engine(max_num_seqs=1), ServerConfig(max_queue=2), max_num_seqs=1) as server:

        async def main() -> list[object]:
            async with server.async_client() as client:
                calls = [client.completions.create(**given(i, 100)) for i in range(8)]
                return await asyncio.gather(*calls, return_exceptions=True)

        results = asyncio.run(main())
        refused = [r for r in results if isinstance(r, openai.RateLimitError)]
        assert 0 < len(refused) <= 5 and len(refused) + sum(isinstance(r, openai.types.Completion) for r in results) == 8
        assert int(refused[0].response.headers["retry-after"]) >= 1 and refused[0].code == "queue_full"


def test_a_deadline_ends_requests_whole_or_streamed() -> None:
    with running(tiny_engine(), ServerConfig(request_timeout=0.15)) as server, server.client() as client:
        slow(server, 0.02)
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(**given(0, 500))
        assert caught.value.status_code == 504 and caught.value.code == "request_timeout"
        with pytest.raises(openai.APIError, match="server's limit"):
            list(client.completions.create(**given(0, 500), stream=True))


def slow(server: Running, seconds: float) -> None:
    """Make each step take a while."""
    runner = server.service.engine.text.core._runner
    execute = runner.execute
    runner.execute = lambda plan: (time.sleep(seconds), execute(plan))[1]


def test_silence_is_filled_with_comments() -> None:
    with running(tiny_engine(), ServerConfig(keep_alive=0.05)) as server:
        slow(server, 0.3)
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        lines = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).text.split("\n\n")
        assert lines[0] == ": keep-alive" and lines[-2] == "data: [DONE]"


def test_a_failing_step_fails_its_requests_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    with running(tiny_engine()) as server, server.client() as client:
        runner = server.service.engine.text.core._runner
        execute, failing = runner.execute, threading.Event()

        def fail(plan: object) -> object:
            if failing.is_set():
                failing.clear()
                raise RuntimeError("the device fell off")
            return execute(plan)

        runner.execute = fail
        failing.set()
        with pytest.raises(openai.InternalServerError, match="fell off") as caught:
            client.completions.create(**given(0), extra_headers={"x-request-id": "my-id"})
        assert caught.value.code == "engine_error" and caught.value.request_id == "my-id"
        assert any("my-id" in record.getMessage() for record in caplog.records)
        stream = client.completions.create(**given(1, 300), stream=True)
        next(iter(stream))
        failing.set()
        with pytest.raises(openai.APIError, match="fell off"):
            list(stream)
        assert client.completions.create(**given(2)).choices[0].text


def test_a_failure_between_steps_is_survived() -> None:
    with running(tiny_engine()) as server, server.client() as client:
        outputs = server.service.engine.text._outputs
        push = outputs.push

        def fail(update: object) -> None:
            outputs.push = push
            raise KeyError("lost")

        outputs.push = fail
        with pytest.raises(openai.InternalServerError, match="lost"):
            client.completions.create(**given(0))
        assert client.completions.create(**given(1)).choices[0].text


def test_a_bug_in_the_server_is_a_500_in_openais_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tiny_engine()) as server:
        monkeypatch.setattr(server.service, "encode", None)
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert reply.status_code == 500 and reply.json()["error"]["code"] == "internal_error" and "NoneType" not in reply.text
        assert 'path="/v1/completions",status="500"' in httpx.get(f"{server.url}/metrics").text


def test_readiness_fails_while_a_step_hangs_and_while_draining(caplog: pytest.LogCaptureFixture) -> None:
    with running(tiny_engine(), ServerConfig(stall_timeout=0.1, drain_timeout=0.2)) as server:
        release = threading.Event()
        runner = server.service.engine.text.core._runner
        execute = runner.execute
        runner.execute = lambda plan: (release.wait(20), execute(plan))[1]
        caller = threading.Thread(target=lambda: httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=30))
        assert httpx.get(f"{server.url}/ready").status_code == 200
        watchdog = asyncio.run_coroutine_threadsafe(server.service.watch_engine(), server.loop)
        caller.start()
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert "octavo_http_requests_total" in httpx.get(f"{server.url}/metrics", timeout=10).text
        wait_until(lambda: "has hung" in caplog.text)
        release.set()
        caller.join()
        wait_until(lambda: "goes on" in caplog.text)
        watchdog.cancel()
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        runner.execute = execute
        slow(server, 0.05)
        with server.client() as client, client.completions.create(**given(0, 500), stream=True) as stream:
            next(iter(stream))
            server.loop.call_soon_threadsafe(server.service.drain)
            wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
            with pytest.raises(openai.APIStatusError) as caught:
                client.completions.create(**given(1))
            assert caught.value.status_code == 503
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)


def test_the_key_is_asked_for_everywhere_but_at_the_probes() -> None:
    with running(tiny_engine(), ServerConfig(api_key="secret ключ")) as server:
        for path in ("/v1/models", "/metrics", "/nothing"):
            for key in ("", "Bearer secret", "Basic secret", "Bearer"):
                reply = httpx.get(f"{server.url}{path}", headers={"authorization": key})
                assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
        assert {httpx.get(f"{server.url}{path}").status_code for path in ("/health", "/ready", "/docs", "/openapi.json")} == {200}
        headers = {"authorization": "bearer secret ключ".encode()}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200


def test_ids_cors_and_bodies(server: Running) -> None:
    def post(**given: object) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", timeout=30, **given)

    assert post(json={"prompt": "x"}, headers={"x-request-id": "a-1"}).headers["x-request-id"] == "a-1"
    assert len(post(json={"prompt": "x"}, headers={"x-request-id": "a b"}).headers["x-request-id"]) == 32
    origin = {"origin": "https://page.example"}
    assert post(json={"prompt": "x"}, headers=origin).headers["access-control-allow-origin"] == "https://page.example"
    preflight = httpx.options(f"{server.url}/v1/completions", headers=origin | {"access-control-request-method": "POST"})
    assert preflight.status_code == 200
    large = json.dumps({"prompt": "x" * 2**20}).encode()
    assert post(content=large).status_code == 413
    chunked = post(content=iter([large[: 2**19], large[2**19 :]]), headers={"content-type": "application/json"})
    assert chunked.status_code == 413 and "max_body_size" in chunked.json()["error"]["message"]


MANY = 100_000
HOSTILE = {
    "many wrong prompts": b'{"prompt":[' + b"[[]]," * MANY + b"[]]}",
    "many wrong messages": b'{"prompt":5,"tokens":["x"],"messages":[' + b"{}," * MANY + b"1]}",
    "many biases": b'{"messages":[{"role":"user","content":"x"}],"prompt":"x","logit_bias":{'
    + b",".join(b'"%d":"x"' % i for i in range(MANY // 2))
    + b"}}",
    "deep": b'{"prompt":' + b"[" * 100_000,
    "deep and closed": b'{"prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep object": b'{"prompt":"x","metadata":' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001,
    "huge integer": b'{"prompt":"x","seed":' + b"9" * 5000 + b"}",
    "huge exponent": b'{"prompt":"x","temperature":1e999999}',
    "nan": b'{"prompt":"x","temperature":NaN}',
    "not utf-8": b'{"prompt":"\xff\xfe"}',
    "not json": b"prompt=x",
    "empty": b"",
    "null": b"null",
    "a list": b"[1]",
    "a string": b'"x"',
    "cut": b'{"prompt": "x',
    "nul": b'{"prompt":"x","stop":[null]}',
    "same key": b'{"prompt":"x","prompt":3}',
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_hostile_bodies_cost_an_error(server: Running, name: str, path: str) -> None:
    reply = httpx.post(f"{server.url}{path}", content=HOSTILE[name], headers={"content-type": "application/json"}, timeout=30)
    if path not in ("/v1/completions", "/v1/chat/completions") and reply.status_code == 200:
        return  # the bad field is not one of this body's
    assert reply.status_code == 400, reply.text[:300]
    assert reply.json()["error"]["message"] and len(reply.text) < 3000


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405), ("GET", "/v1/models/other", 404)],
)
def test_all_errors_have_openais_shape(server: Running, method: str, path: str, status: int) -> None:
    reply = httpx.request(method, f"{server.url}{path}")
    assert reply.status_code == status and set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_models_and_tokens(server: Running, client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    for text in PROMPTS:
        tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()
        assert tokens["count"] == len(tokens["tokens"])
        assert httpx.post(f"{server.url}/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "Hi"}]
    tokens = httpx.post(f"{server.url}/tokenize", json={"messages": messages}).json()["tokens"]
    rendered = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
