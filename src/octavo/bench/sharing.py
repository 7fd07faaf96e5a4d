"""``octavo bench sharing``: what sharing blocks saves, in memory and in time. Everything runs on the model itself.

Memory saved is (blocks saved by sharing) / (blocks needed without it), each summed over all steps: the definition of
PagedAttention's paper (Kwon et al., arXiv 2309.06180, section 6.3), whose figures stand beside ours.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.bench.workloads import spread_lengths
from octavo.llm import LLM
from octavo.request import SamplingParams

SEEDS = ["Once upon a time", "The history of the city", "In this chapter we", "Dear Sir or Madam,", "def main():", "Question: What is"]
WIDTHS = (2, 4, 6)
PAPER: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("Alpaca", "sampling"): (6.1, 8.5, 9.8),
    ("ShareGPT", "sampling"): (16.2, None, 30.5),
    ("Alpaca", "beams"): (37.6, 53.1, 55.2),
    ("ShareGPT", "beams"): (44.3, None, 66.3),
}
"""Per cent saved in the paper with 2, 4 and 6 sequences; None where it does not say."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean lengths of a data set, in tokens."""

    name: str
    mean_input: float
    mean_output: float


DATASETS = (Lengths("Alpaca", 19.3, 58.5), Lengths("ShareGPT", 161.3, 338.0))


@dataclass(frozen=True, slots=True)
class Saving:
    """Memory saved by one way of decoding."""

    dataset: str
    kind: str
    """sampling or beams"""
    width: int
    num_requests: int
    saved: float
    """Share of the blocks that would be needed without sharing."""
    paper: float | None


@dataclass(frozen=True, slots=True)
class Timing:
    """Two ways of doing the same, in turns in one run: medians in seconds, and tokens that went through the model."""

    name: str
    with_sharing: float
    without: float
    computed_with: int
    computed_without: int


def measure_savings(llm: LLM, num_requests: int, report: Callable[[str], None] = print) -> list[Saving]:
    """All requests at once, each decoded as 2, 4 and 6 samples and as 2, 4 and 6 beams of its full output length.

    ShareGPT takes a third of ``num_requests``. The prefix cache is not used, so that only forks share.
    """
    text = _sample_text(llm)
    savings = []
    for lengths in DATASETS:
        count = num_requests if lengths is DATASETS[0] else max(2, num_requests // 3)
        requests = draw_requests(lengths, count, text, llm.max_model_len)
        for kind in ("sampling", "beams"):
            for place, width in enumerate(WIDTHS):
                saved = _saved(llm, requests, kind, width)
                savings.append(Saving(lengths.name, kind, width, count, saved, PAPER[lengths.name, kind][place]))
                report(f"{lengths.name}, {kind} {width}: {saved:.1%}")
    return savings


def draw_requests(lengths: Lengths, count: int, text: Sequence[int], longest: int) -> list[tuple[list[int], int]]:
    """``count`` prompts cut from ``text`` at random, each with the number of tokens to generate."""
    chance = random.Random(0)
    inputs = spread_lengths(count, lengths.mean_input, min(longest // 2, len(text) // 2))
    outputs = spread_lengths(count, lengths.mean_output, longest - longest // 2)
    chance.shuffle(outputs)
    begins = [chance.randrange(len(text) - prompt_len) for prompt_len in inputs]
    return [([*text[begin : begin + n]], m) for begin, n, m in zip(begins, inputs, outputs, strict=True)]


def _saved(llm: LLM, requests: Sequence[tuple[list[int], int]], kind: str, width: int) -> float:
    how: dict[str, Any] = {"n": width, "temperature": 1.0} if kind == "sampling" else {"beam_width": width, "temperature": 0.0}
    params = [SamplingParams(max_tokens=m, ignore_eos=True, cache_prefix=False, seed=i, **how) for i, (_, m) in enumerate(requests)]
    before = llm.stats()["sharing"]
    llm.generate([prompt for prompt, _ in requests], params)
    after = llm.stats()["sharing"]
    saved, used = (after[name] - before[name] for name in ("block_steps_saved", "block_steps_used"))
    return float(saved / (saved + used))


def _sample_text(llm: LLM) -> list[int]:
    """A few thousand tokens in the model's own words, so that prompts are text and not noise."""
    params = [SamplingParams(temperature=0.8, max_tokens=400, ignore_eos=True, seed=i) for i in range(len(SEEDS))]
    outputs = llm.generate(SEEDS, params)
    return [token for output in outputs for token in output.outputs[0].token_ids]


def measure_times(llm: LLM, num_repeats: int = 3, num_requests: int = 16, prefix_len: int = 512, n: int = 8) -> list[Timing]:
    """With sharing and without, in turns, from an empty cache each time."""
    chance = random.Random(1)

    def noise(count: int) -> list[int]:
        return [chance.randrange(3, llm.vocab_size) for _ in range(count)]

    prefix = noise(prefix_len)
    many = [[*prefix, *noise(32)] for _ in range(num_requests)]
    prompt = noise(256)

    def shared_prefix(cache: bool) -> None:
        llm.generate(many, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, cache_prefix=cache))

    def samples(fork: bool) -> None:
        params = SamplingParams(n=n if fork else 1, max_tokens=32, ignore_eos=True, cache_prefix=False, seed=0)
        llm.generate([prompt] * (1 if fork else n), params)

    return [
        _in_turns(
            llm, f"{num_requests} requests of {prefix_len} shared + 32 own tokens: prefix cache on / off", shared_prefix, num_repeats
        ),
        _in_turns(llm, f"{n} samples of a prompt of 256 tokens: n={n} / {n} requests, cache off", samples, num_repeats),
    ]


def _in_turns(llm: LLM, name: str, run: Callable[[bool], None], num_repeats: int) -> Timing:
    walls: dict[bool, list[float]] = {True: [], False: []}
    computed = {True: 0, False: 0}
    for _ in range(num_repeats):
        for sharing in (True, False):
            llm.reset_prefix_cache()
            before, start = llm.stats()["num_tokens_computed"], time.perf_counter()
            run(sharing)
            walls[sharing].append(time.perf_counter() - start)
            computed[sharing] = llm.stats()["num_tokens_computed"] - before
    return Timing(name, statistics.median(walls[True]), statistics.median(walls[False]), computed[True], computed[False])
