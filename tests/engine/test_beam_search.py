"""Beam search in the engine against ``transformers``, in float32: tokens and scores, whatever else runs and whoever is preempted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from octavo import LLM, FinishReason, InvalidRequestError, RequestOutput, SamplingParams
from octavo.engine.async_engine import AsyncEngine
from octavo.kernels.backends import describe
from tests.helpers.beam_oracle import Search, close_scores, likely_tokens, sharp_model, transformers_beams
from tests.models import tiny

pytest.importorskip("torch")
pytest.importorskip("transformers")

DEVICES = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not describe()["native"], reason="the native module is not built"))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("sharp")
    sharp_model().save_pretrained(path)
    tiny.write_tokenizer(path)
    return path


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def llm(checkpoint: Path, device: str) -> Iterator[LLM]:
    with LLM(str(checkpoint), dtype="float32", device=device, block_size=4, num_blocks=600, max_num_batched_tokens=48, threads=2) as model:
        yield model
        check_idle(model)


def check_idle(llm: LLM) -> None:
    llm.check()
    stats = llm.stats()
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert stats["blocks"]["free"] == stats["blocks"]["total"], "blocks leaked"


def some_searches(seed: int, count: int) -> list[Search]:
    """Widths 2 to 8, all modes, penalties from -1 to 2, stop tokens that end beams early or never."""
    chance = random.Random(seed)
    searches = []
    for i in range(count):
        prompt = tuple(chance.randrange(3, 250) for _ in range(chance.choice([1, 3, 11, 16, 30])))
        stops = likely_tokens(prompt, chance.choice([0, 0, 1, 4]))
        penalty = chance.choice([-1.0, 0.0, 0.6, 1.0, 2.0])
        searches.append(Search(prompt, 2 + i % 7, penalty, (True, False, "never")[i % 3], stops, chance.choice([1, 6, 14, 18])))
    return searches


def params_of(search: Search, n: int | None = None) -> SamplingParams:
    return SamplingParams(
        n=search.width if n is None else n, temperature=0.0, beam_width=search.width, length_penalty=search.length_penalty,
        early_stopping=search.early_stopping, stop_token_ids=search.stop_ids, ignore_eos=True, max_tokens=search.max_tokens,
        min_tokens=search.min_tokens,
    )  # fmt: skip


def assert_as_transformers(searches: Sequence[Search], outputs: Sequence[RequestOutput]) -> None:
    for search, output in zip(searches, outputs, strict=True):
        tokens, scores = transformers_beams(search)
        assert [o.token_ids for o in output.outputs] == tokens, search
        assert [o.score for o in output.outputs] == close_scores(scores), search
        for index, completion in enumerate(output.outputs):
            assert completion.index == index
            assert completion.score is not None and completion.cumulative_logprob is not None
            length = len(completion.token_ids)
            assert completion.score == pytest.approx(completion.cumulative_logprob / length**search.length_penalty)
            stopped = completion.token_ids[-1] in search.stop_ids
            assert completion.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert stopped or length == search.max_tokens


def test_one_search_at_a_time(llm: LLM) -> None:
    searches = some_searches(0, 14)
    assert_as_transformers(searches, [llm.generate([list(s.prompt)], params_of(s), report=lambda _: llm.check())[0] for s in searches])


def test_searches_together_and_with_other_traffic(llm: LLM) -> None:
    searches = some_searches(1, 21)
    others = [SamplingParams(temperature=1.0, seed=i, max_tokens=5 + i, ignore_eos=True) for i in range(12)]
    prompts = [list(s.prompt) for s in searches] + [[7 + i] * (3 * i + 1) for i in range(12)]
    order = random.Random(2).sample(range(33), 33)
    params = [*map(params_of, searches), *others]
    outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order], report=lambda _: llm.check())
    by_number = dict(zip(order, outputs, strict=True))
    assert_as_transformers(searches, [by_number[i] for i in range(21)])
    alone = [llm.generate([prompts[21 + i]], others[i])[0] for i in range(12)]
    assert [by_number[21 + i].outputs[0].token_ids for i in range(12)] == [o.outputs[0].token_ids for o in alone]


def test_groups_are_preempted_and_resumed_as_one(checkpoint: Path, device: str) -> None:
    searches = [s for s in some_searches(3, 28) if s.max_tokens > 6]
    widest = max(s.width * (-(-s.max_tokens // 4) + 1) + len(s.prompt) // 4 for s in searches)
    with LLM(
        str(checkpoint), dtype="float32", device=device, block_size=4, num_blocks=widest + 6, max_num_batched_tokens=19, threads=2
    ) as llm:  # fmt: skip
        outputs = llm.generate([list(s.prompt) for s in searches], [params_of(s) for s in searches], report=lambda _: llm.check())
        assert_as_transformers(searches, outputs)
        assert llm.stats()["num_preemptions"] >= 5
        check_idle(llm)
    assert sum(o.metrics.num_preemptions for o in outputs if o.metrics is not None) >= 5


def test_no_beam_ends_before_min_tokens(llm: LLM) -> None:
    prompt = (5, 9, 17, 42, 8)
    searches = [Search(prompt, 3 + i, 1.0, mode, likely_tokens(prompt, 4), 12, 2 + 3 * i) for i, mode in enumerate((True, False, "never"))]
    outputs = llm.generate([list(prompt)] * 3, [params_of(s) for s in searches])
    assert_as_transformers(searches, outputs)
    assert min(len(o.token_ids) for o in outputs[2].outputs) >= 8


def test_n_takes_the_best_of_the_beams(llm: LLM) -> None:
    search = some_searches(4, 5)[4]
    for n in (1, 3):
        [output] = llm.generate([list(search.prompt)], params_of(search, n))
        assert [o.token_ids for o in output.outputs] == transformers_beams(search)[0][:n]
    with pytest.raises(InvalidRequestError, match=r"n=7 .* beam_width=6"):
        params_of(search, 7)


def test_log_probabilities_of_each_beam_sum_to_its_own(llm: LLM) -> None:
    search = some_searches(5, 3)[2]
    [output] = llm.generate([list(search.prompt)], SamplingParams(n=2, temperature=0.0, beam_width=4, max_tokens=9, logprobs=3))
    assert search and len(output.outputs) == 2
    for completion in output.outputs:
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
        chosen = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert sum(chosen) == pytest.approx(completion.cumulative_logprob)
        assert all(3 <= len(entry) <= 4 for entry in completion.logprobs)


def test_streaming_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="beams cannot be streamed"):
        next(llm.stream([5, 6], SamplingParams(temperature=0.0, beam_width=2)))


def test_the_async_engine_gives_all_beams_at_the_end(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, beam_width=3, n=2, max_tokens=5)
    [expected] = llm.generate([5, 6], params)

    async def both() -> RequestOutput:
        async with AsyncEngine(llm._open.engine) as engine:
            with pytest.raises(InvalidRequestError, match="beams cannot be streamed"):
                async for _ in engine.stream([5, 6], params):
                    pass
            return await engine.generate([5, 6], params)

    assert asyncio.run(both()).outputs == expected.outputs
