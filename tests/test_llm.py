"""The offline interface, on the real model."""

from __future__ import annotations

import math

import pytest

from octavo import (
    LLM,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    EngineError,
    FinishReason,
    InvalidRequestError,
    MemoryConfigError,
    ModelLoadError,
    SamplingParams,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
PROMPTS = ["The capital of France is", "Once upon a time", "Water is made of", "Two plus two is"]


def test_many_prompts_at_once_in_their_order(idle: LLM) -> None:
    outputs = idle.generate(PROMPTS, GREEDY)
    assert [o.prompt for o in outputs] == PROMPTS
    assert "Paris" in outputs[0].outputs[0].text
    assert [o.outputs[0].text for o in outputs] == [idle.generate(p, GREEDY)[0].outputs[0].text for p in PROMPTS]


def test_one_prompt_gives_a_list_and_ids_are_a_prompt(idle: LLM) -> None:
    [by_text] = idle.generate(PROMPTS[0], GREEDY)
    [by_ids] = idle.generate(idle.tokenizer.encode(PROMPTS[0]), GREEDY)
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert by_ids.prompt is None and by_text.prompt_token_ids == by_ids.prompt_token_ids
    assert idle.generate([], GREEDY) == []


def test_defaults_sample_sixteen_tokens_at_temperature_one(idle: LLM) -> None:
    [output] = idle.generate(PROMPTS[1])
    assert len(output.outputs[0].token_ids) <= 16
    m = output.metrics
    assert m is not None and m.first_token_time is not None and m.finish_time is not None
    assert m.arrival_time <= m.first_token_time <= m.finish_time and m.num_preemptions == 0


def test_seeds_decide(idle: LLM) -> None:
    def draw(seed: int, company: int) -> tuple[int, ...]:
        params = [SamplingParams(seed=seed, max_tokens=12), *[SamplingParams(seed=99, max_tokens=9)] * company]
        return idle.generate([PROMPTS[1]] + [PROMPTS[0]] * company, params)[0].outputs[0].token_ids

    assert draw(1, 0) == draw(1, 3)
    assert len({draw(seed, 0) for seed in range(6)}) > 3


def test_params_per_prompt_must_match(idle: LLM) -> None:
    outputs = idle.generate(PROMPTS[:2], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 3]
    with pytest.raises(InvalidRequestError, match="2 prompts and 1 SamplingParams"):
        idle.generate(PROMPTS[:2], [GREEDY])


def test_a_bad_prompt_raises_with_its_index_or_becomes_its_error(idle: LLM) -> None:
    steps = idle.stats()["num_steps"]
    with pytest.raises(InvalidRequestError, match=r"prompt 1: .*empty"):
        idle.generate([PROMPTS[0], [], PROMPTS[1]], GREEDY)
    assert idle.stats()["num_steps"] == steps, "something ran"
    outputs = idle.generate([PROMPTS[0], [], [10**9], [1] * 10_000], GREEDY, errors="return")
    assert outputs[0].error is None and outputs[0].outputs[0].text
    assert all(isinstance(o.error, InvalidRequestError) and o.outputs[0].finish_reason is FinishReason.ERROR for o in outputs[1:])
    assert isinstance(outputs[3].error, ContextLengthError)


@pytest.mark.parametrize("bad", [{"max_tokns": 3}, {"temperature": float("nan")}, {"top_p": 0.0}, {"stop": ("",)}, {"logprobs": 1000}])
def test_bad_params_are_errors(bad: dict[str, object]) -> None:
    with pytest.raises((InvalidRequestError, TypeError)):
        SamplingParams(**bad)  # type: ignore[arg-type]


def test_a_stop_string_ends_the_text_before_it(idle: LLM) -> None:
    [full] = idle.generate(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=40))
    text = full.outputs[0].text
    stop = text[20:27]  # anywhere: it may begin and end within tokens
    [cut] = idle.generate(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=40, stop=stop))
    completion = cut.outputs[0]
    assert completion.text == text[: text.find(stop)]
    assert completion.finish_reason is FinishReason.STOP and completion.stop_reason == stop
    assert len(completion.token_ids) < len(full.outputs[0].token_ids)


@pytest.mark.parametrize("stop", [(), (" time", "zzz"), ("village", "the")])
def test_a_stream_concatenates_to_the_whole(idle: LLM, stop: tuple[str, ...]) -> None:
    for prompt in (PROMPTS[1], "Emoji: 😀😃 and 漢字:", "ñandú → "):
        params = SamplingParams(temperature=1.2, seed=3, max_tokens=40, stop=stop)
        [whole] = idle.generate(prompt, params)
        parts = list(idle.stream(prompt, params))
        assert "".join(p.outputs[0].text for p in parts) == whole.outputs[0].text
        assert [p.finished for p in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].outputs[0].token_ids == whole.outputs[0].token_ids
        assert parts[-1].outputs[0].finish_reason == whole.outputs[0].finish_reason


def test_stop_tokens_end_token_ids_but_not_the_text(idle: LLM) -> None:
    [full] = idle.generate(PROMPTS[0], GREEDY)
    ids = full.outputs[0].token_ids
    stop = next(t for i, t in enumerate(ids) if i >= 4 and t not in ids[:i])
    [cut] = idle.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=16, stop_token_ids=[stop]))
    completion = cut.outputs[0]
    assert completion.token_ids == ids[: ids.index(stop) + 1]
    assert completion.stop_reason == stop and completion.finish_reason is FinishReason.STOP
    assert completion.text == idle.tokenizer.decode(completion.token_ids[:-1])
    [later] = idle.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=16, stop_token_ids=[stop], min_tokens=16))
    assert len(later.outputs[0].token_ids) == 16 and stop not in later.outputs[0].token_ids[:15]


def test_logprobs_are_of_the_raw_distribution(idle: LLM) -> None:
    params = SamplingParams(temperature=0.7, top_k=3, repetition_penalty=1.3, seed=5, max_tokens=6, logprobs=4, prompt_logprobs=2)
    [output] = idle.generate(PROMPTS[0], params)
    [completion] = output.outputs
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
    for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert token in position and len(position) in (4, 5)
        best = sorted(position.values(), key=lambda x: x.rank)
        assert [x.logprob for x in best] == sorted((x.logprob for x in best), reverse=True)
        assert sum(math.exp(x.logprob) for x in best) <= 1 + 1e-5
    total = sum(position[token].logprob for token, position in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    entries = output.prompt_logprobs
    assert entries is not None and entries[0] is None and len(entries) == len(output.prompt_token_ids)
    assert all(e is not None and token in e for e, token in zip(entries[1:], output.prompt_token_ids[1:], strict=True))


def test_prompt_logprobs_agree_with_output_logprobs(idle: LLM) -> None:
    """What a token scored as output, it scores as part of a prompt, to the bit."""
    [first] = idle.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=5, logprobs=0))
    tokens = first.outputs[0].token_ids
    [second] = idle.generate([*first.prompt_token_ids, *tokens], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert first.outputs[0].logprobs is not None and second.prompt_logprobs is not None
    assert list(first.outputs[0].logprobs) == list(second.prompt_logprobs[-len(tokens) :])


def test_allowed_tokens_and_bias(idle: LLM) -> None:
    allowed = idle.tokenizer.encode(" yes no")
    [output] = idle.generate(PROMPTS[3], SamplingParams(max_tokens=8, allowed_token_ids=allowed, ignore_eos=True, seed=0))
    assert set(output.outputs[0].token_ids) <= set(allowed)
    [biased] = idle.generate(PROMPTS[3], SamplingParams(temperature=0.0, max_tokens=3, logit_bias={allowed[0]: 100.0}))
    assert set(biased.outputs[0].token_ids) == {allowed[0]}


def test_a_request_that_forbids_every_token_fails_alone(idle: LLM) -> None:
    nothing = SamplingParams(max_tokens=4, forbidden_token_ids=range(idle.vocab_size), n=2)
    bad, good = idle.generate(PROMPTS[:2], [nothing, GREEDY])
    assert isinstance(bad.error, EngineError) and "forbids all" in str(bad.error)
    assert all(o.finish_reason is FinishReason.ERROR and not o.token_ids for o in bad.outputs)
    assert good.error is None and len(good.outputs[0].token_ids) == 16


def test_chat_answers(idle: LLM) -> None:
    [output] = idle.chat([{"role": "user", "content": "Name the capital of France."}], SamplingParams(temperature=0.0, max_tokens=40))
    assert "Paris" in output.outputs[0].text and output.outputs[0].finish_reason is FinishReason.STOP
    two = idle.chat([[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Name a colour."}]], GREEDY)
    assert len(two) == 2


def test_leaving_a_stream_early_frees_its_blocks(idle: LLM) -> None:
    stream = idle.stream(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    next(stream)
    assert idle.stats()["blocks"]["used"] > 0
    stream.close()


def test_wasted_slots_stay_under_a_block_per_request(idle: LLM) -> None:
    seen = []
    idle.generate(PROMPTS * 4, GREEDY, report=lambda stats: seen.append(stats["waste"]["max_slots_per_request"]))
    assert seen and max(seen) < 16


def test_start_says_what_does_not_fit_and_what_would() -> None:
    with pytest.raises(MemoryConfigError, match=r"raise kv_memory to \d+ bytes, or num_blocks to 512, or lower max_model_len to 64"):
        LLM(num_blocks=4, max_model_len=8192)
    with pytest.raises(MemoryConfigError, match="lower kv_memory to"):
        LLM(kv_memory="100TiB")
    with pytest.raises(ConfigError, match="give one of them"):
        LLM(num_blocks=4, kv_memory="1GiB")
    with pytest.raises(ConfigError, match="1, 2, 4, 8, 16, 32, 64, 128, 256"):
        LLM(block_size=48)
    with pytest.raises(ModelLoadError, match="no-such-model"):
        LLM("no-such-model")


def test_the_longest_context_follows_from_a_small_pool() -> None:
    with LLM(num_blocks=8, device="reference") as small:
        assert small.max_model_len == 128
        [output] = small.generate([[5] * 126], SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 2 and output.outputs[0].finish_reason is FinishReason.LENGTH
    with pytest.raises(EngineClosedError):
        small.generate("x")
