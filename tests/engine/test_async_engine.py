"""The async engine: many clients, cancellation, refusals, shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from octavo import LLM, AsyncEngine, EngineClosedError, InvalidRequestError, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "Water is made of", "Two plus two is"]
Client = Callable[[AsyncEngine], Coroutine[Any, Any, None]]


def run(llm: LLM, client: Client) -> None:
    """Run a client against an async engine of its own thread, with a limit on its time."""

    async def main() -> None:
        async with AsyncEngine(llm.engine) as engine:
            await asyncio.wait_for(client(engine), 120)

    asyncio.run(main())


def test_many_clients_get_what_they_get_alone(idle: LLM) -> None:
    params = [SamplingParams(seed=i, max_tokens=5 + i % 7, stop=" the") for i in range(24)]
    prompts = [PROMPTS[i % 4] for i in range(24)]
    expected = [o.outputs[0] for o in idle.generate(prompts, params)]

    async def client(engine: AsyncEngine) -> None:
        outputs = await asyncio.gather(*(engine.generate(p, q) for p, q in zip(prompts, params, strict=True)))
        assert [o.outputs[0] for o in outputs] == expected

    run(idle, client)


def test_a_stream_only_grows(idle: LLM) -> None:
    async def client(engine: AsyncEngine) -> None:
        texts = [o.outputs[0].text async for o in engine.stream(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=20))]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts)) and len(texts) > 5

    run(idle, client)


def test_leaving_a_stream_aborts_and_frees(idle: LLM) -> None:
    async def client(engine: AsyncEngine) -> None:
        stream = engine.stream(PROMPTS[1], SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(engine.generate(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            if (await engine.stats())["blocks"]["used"] == 0:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("blocks are still held")

    run(idle, client)


def test_a_refusal_reaches_its_client_alone(idle: LLM) -> None:
    async def client(engine: AsyncEngine) -> None:
        good = asyncio.create_task(engine.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=8)))
        with pytest.raises(InvalidRequestError, match="empty"):
            await engine.generate([], SamplingParams())
        assert "Paris" in (await good).outputs[0].text

    run(idle, client)


def test_closing_ends_streams_and_refuses_new_ones(idle: LLM) -> None:
    async def client(engine: AsyncEngine) -> None:
        stream = engine.stream(PROMPTS[1], SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        outputs = [o async for o in stream]
        assert outputs[-1].outputs[0].finish_reason == "abort"
        with pytest.raises(EngineClosedError):
            await engine.generate(PROMPTS[0], SamplingParams())

    run(idle, client)
