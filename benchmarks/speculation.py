"""Speculation on against off: ``python benchmarks/speculation.py [1] [8] [64]``, for so many requests at once.

Where text repeats (copying, summarising, editing code: prompts from this repository's own files) and where it does not (stories at
temperature 1, random ids). Prompts are cached, so what is timed is decoding; tokens are compared, on and off run in turns. With
OCTAVO_BENCH_THREADS=1 it is CPU time that is measured, which other processes on the machine disturb less.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from common import SHARED, THREADS, show

from octavo import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
MOST = 8
clock = time.perf_counter if THREADS > 1 else time.process_time


class Work(NamedTuple):
    """``count`` prompts and how they are sampled."""

    name: str
    prompts: Callable[[LLM, int], list[list[int]]]
    temperature: float = 0.0


def passages(text: str, count: int, length: int) -> list[str]:
    """Pieces of a text, spread over it, each from the beginning of a line on."""
    starts = [text.find("\n", i * max(0, len(text) - length) // max(1, count)) + 1 for i in range(count)]
    return [text[start : start + length] for start in starts]


def asking(question: str, files: str, length: int) -> Callable[[LLM, int], list[list[int]]]:
    """The question about passages of the repository's files."""

    def prompts(llm: LLM, count: int) -> list[list[int]]:
        text = "\n".join(path.read_text() for path in sorted(ROOT.glob(files)))
        return [llm.engine.render([{"role": "user", "content": question + piece}]) for piece in passages(text, count, length)]

    return prompts


def stories(llm: LLM, count: int) -> list[list[int]]:
    things = ["a fox", "a lighthouse", "the last train", "a violin", "two brothers", "a lost letter", "the sea", "an old robot"]
    texts = [f"Write a story about {things[i % 8]} and {things[(i // 8 + i + 1) % 8]}, number {i}." for i in range(count)]
    return [llm.engine.render([{"role": "user", "content": text}]) for text in texts]


def random_ids(llm: LLM, count: int) -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(1000, 40_000) for _ in range(128)] for _ in range(count)]


def workload_b(llm: LLM, count: int) -> list[list[int]]:
    [work] = json.loads((SHARED / "bench" / "workload_b.json").read_text())
    return [[*work["prompt"][i % 128 :], *work["prompt"][: i % 128]] for i in range(count)]


WORKS = [
    Work("copy a text", asking("Repeat this text word for word:\n\n", "docs/*.md", 1500)),
    Work("edit code", asking("Rename the first variable and print all of this code again:\n\n", "src/octavo/blocks/*.py", 1500)),
    Work("summarise", asking("Summarise this text, quoting its key phrases:\n\n", "docs/*.md", 2500)),
    Work("summarise, temperature 0.7", asking("Summarise this text:\n\n", "docs/*.md", 2500), 0.7),
    Work("story, greedy", stories),
    Work("story, temperature 1", stories, 1.0),
    Work("random ids, temperature 1", random_ids, 1.0),
]


def output_len(count: int) -> int:
    return 128 if count < 64 else 64


class Run(NamedTuple):
    tokens: list[tuple[int, ...]]
    seconds: float


def timed(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Run:
    start = clock()
    outputs = llm.generate(prompts, params)
    seconds = clock() - start
    return Run([output.outputs[0].token_ids for output in outputs], seconds)


def compare(off: LLM, on: LLM, work: Work, count: int, repeats: int) -> list[str]:
    prompts, output = work.prompts(off, count), output_len(count)
    params = [SamplingParams(temperature=work.temperature, seed=i, max_tokens=output, ignore_eos=True) for i in range(count)]
    assert timed(off, prompts, params).tokens == timed(on, prompts, params).tokens, "speculation changed a token"
    before = on.stats()["speculation"]
    pairs = [(timed(off, prompts, params).seconds, timed(on, prompts, params).seconds) for _ in range(repeats)]
    after, tokens = on.stats()["speculation"], count * output
    drafted, accepted = ((after[name] - before[name]) / repeats for name in ("drafted", "accepted"))
    slow, fast = (statistics.median(times) for times in zip(*pairs, strict=True))
    gain = statistics.median(a / b for a, b in pairs)
    share = f"{accepted / drafted:.0%}" if drafted else "-"
    return [work.name, f"{tokens / slow:.0f}", f"{tokens / fast:.0f}", f"{gain:.2f}", f"{drafted / tokens:.2f}", share]


def main() -> None:
    works = WORKS + ([Work("workload B, greedy", workload_b)] if SHARED.is_dir() else [])
    off, on = (LLM(kv_memory="768MiB", max_num_seqs=64, threads=THREADS, speculative_tokens=most) for most in (0, MOST))
    for count in [int(arg) for arg in sys.argv[1:]] or [1, 8, 64]:
        rows = [compare(off, on, work, count, 3 if count < 64 else 1) for work in works]
        columns = [f"{count} at once", "off, tokens/s", f"on ({MOST}), tokens/s", "times faster", "drafts per token", "accepted"]
        show(f"decoding {output_len(count)} tokens, SmolLM2-135M in bf16", columns, rows)


if __name__ == "__main__":
    main()
