"""Text out of updates: stop strings across token borders, what is held back, decoding once against step by step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.outputs import OutputProcessor, RequestOutput
from octavo.request import FinishReason, SamplingParams
from octavo.scheduler.step import RequestUpdate
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
    tokenizer: Tokenizer, ids: list[int], params: SamplingParams, ended: FinishReason | None, incremental: bool
) -> list[RequestOutput]:
    """Push one token at a time, as the engine does, until a stop string ends it; all outputs on the way."""
    processor = OutputProcessor(tokenizer)
    processor.add(0, "prompt", [5], params, frozenset({EOS}), incremental)
    outputs = []
    for i, token in enumerate(ids):
        stop = processor.push(RequestUpdate(0, token_ids=(token,), finish_reason=ended if i == len(ids) - 1 else None))
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
