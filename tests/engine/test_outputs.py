"""Text out of updates: stop strings across token borders, what is held back, decoding once against step by step."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.outputs import OutputProcessor, RequestOutput
from octavo.request import FinishReason, SamplingParams
from octavo.scheduler.step import RequestUpdate, TokenLogprobs
from octavo.text.tokenizer import Tokenizer
from tests.models import tiny

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte, and control tokens 0 to 2."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(path)
    return Tokenizer.from_directory(path)


def feed(
    tokenizer: Tokenizer,
    ids: list[int],
    params: SamplingParams,
    ended: FinishReason | None,
    incremental: bool,
    most: int = 1,
    seed: int = 0,
) -> list[RequestOutput]:
    """Push one token at a time, as the engine does, or up to ``most`` where drafts were accepted, until a stop string ends it; all outputs
    on the way."""
    processor, chance = OutputProcessor(tokenizer), random.Random(seed)
    processor.add(0, "prompt", [5], params, frozenset({EOS}), incremental)
    outputs, start = [], 0
    while start < len(ids):
        new = tuple(ids[start : start + chance.randint(1, most)])
        logprobs = () if params.logprobs is None else tuple(TokenLogprobs(i, -0.5 * i, 1, (), ()) for i in new)
        start += len(new)
        stop = processor.push(RequestUpdate(0, token_ids=new, logprobs=logprobs, finish_reason=ended if start == len(ids) else None))
        if stop is not None:
            processor.push(RequestUpdate(0, finish_reason=FinishReason.STOP, stop_reason=stop))
        ended_now = processor.has_ended(0)
        if incremental or ended_now:
            outputs.append(processor.output(0))
        if ended_now:
            break
    return outputs


@given(text=st.text(alphabet="ab☃é", max_size=14), stops=st.lists(st.text(alphabet="ab☃", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_where_a_search_of_the_whole_text_cuts(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    ids = tokenizer.encode(text + "!", add_special_tokens=False)
    outputs = feed(tokenizer, ids, SamplingParams(stop=stops), FinishReason.LENGTH, incremental=True)
    whole = text + "!"
    # the first stop string to be complete ends it; of those, the one that begins first
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole]
    expected = whole[: min(start for end, start in ends if end == min(ends)[0])] if ends else whole
    final = outputs[-1].outputs[0]
    assert final.text == expected
    assert (final.finish_reason is FinishReason.STOP) == bool(ends)
    for earlier, later in pairwise(outputs):
        assert later.outputs[0].text.startswith(earlier.outputs[0].text), "text that was shown has been taken back"


@given(
    text=st.text(alphabet="ab☃é", min_size=1, max_size=14),
    stops=st.lists(st.text(alphabet="ab☃", min_size=1, max_size=4), max_size=3),
    params=st.builds(dict, min_tokens=st.integers(0, 5), logprobs=st.sampled_from([None, 0])),
    stopped=st.booleans(),
    incremental=st.booleans(),
    most=st.integers(2, 9),
    seed=st.integers(0, 99),
)
def test_several_tokens_at_once_end_where_they_end_one_by_one(
    tokenizer: Tokenizer, text: str, stops: list[str], params: dict[str, Any], stopped: bool, incremental: bool, most: int, seed: int
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False) + [EOS] * stopped
    sampling, reason = SamplingParams(stop=stops, **params), FinishReason.STOP if stopped else FinishReason.LENGTH
    one_by_one = feed(tokenizer, ids, sampling, reason, incremental)
    assert feed(tokenizer, ids, sampling, reason, incremental, most, seed)[-1] == one_by_one[-1]


@given(ids=st.lists(st.integers(3, 258), min_size=1, max_size=30), stopped=st.booleans())
def test_decoding_once_equals_decoding_step_by_step(tokenizer: Tokenizer, ids: list[int], stopped: bool) -> None:
    ids = [*ids, EOS] if stopped else ids
    reason = FinishReason.STOP if stopped else FinishReason.LENGTH
    texts = {feed(tokenizer, ids, SamplingParams(), reason, incremental)[-1].outputs[0].text for incremental in (True, False)}
    assert texts == {tokenizer.decode(ids[:-1] if stopped else ids)}


def test_no_stop_string_counts_before_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abxabxab", add_special_tokens=False)
    outputs = feed(tokenizer, ids, SamplingParams(stop="x", min_tokens=4), FinishReason.LENGTH, incremental=False)
    assert outputs[-1].outputs[0].text == "abxab" and outputs[-1].outputs[0].stop_reason == "x"
