"""The least time that a workload can take on a machine: its operations over the measured rate, its bytes over the measured bandwidth.

Counted are products, attention's products, and the bytes of all weights once per step; neither keys and values nor activations nor scales.
So a limit is a little below what any engine can reach.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Request = Mapping[str, Any]
"""``prompt`` (token ids), ``max_tokens`` and perhaps ``n``: one entry of a workload file."""


@dataclass(frozen=True)
class Shape:
    """What of a model its limits depend on."""

    layer_weights: int
    head_weights: int
    num_layers: int
    num_heads: int
    head_dim: int


SHAPES = {
    "smollm2": Shape(106_168_320, 28_311_552, 30, 9, 64),
    "qwen": Shape(357_826_560, 136_134_656, 24, 14, 64),
}
BITS = {"bf16": (16.0, 16.0), "int8": (8.0, 8.0), "int4": (4.5, 8.0)}
"""Least bits of a weight in the layers and in the head: 4-bit formats carry a scale per block and keep the head in 8 bits."""


@dataclass(frozen=True)
class Work:
    """What one phase computes: tokens through the layers, rows through the head, (query, key) pairs per head, steps one after another."""

    tokens: int
    sampled: int
    pairs: int
    steps: int

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.sampled + other.sampled, self.pairs + other.pairs, self.steps + other.steps)


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens all prompts share.

    >>> common_prefix([[1, 2, 3], [1, 2, 4, 5]])
    2
    """
    columns = enumerate(zip(*prompts, strict=False))
    return next((i for i, tokens in columns if len(set(tokens)) > 1), min(map(len, prompts)))


def prompt_work(requests: Sequence[Request]) -> Work:
    """All prompts, what they begin with in common once."""
    lengths = [len(r["prompt"]) for r in requests]
    shared, spared = common_prefix([r["prompt"] for r in requests]), len(requests) - 1
    return Work(
        sum(lengths) - spared * shared,
        len(requests),
        sum(n * (n + 1) // 2 for n in lengths) - spared * shared * (shared + 1) // 2,
        steps=1,
    )


def decode_work(requests: Sequence[Request]) -> Work:
    """All tokens after the first of each sample. The last one sampled is never computed."""
    tokens = pairs = 0
    for request in requests:
        n, length, more = request.get("n", 1), len(request["prompt"]), request["max_tokens"] - 1
        tokens += n * more
        pairs += n * (more * length + more * (more + 1) // 2)
    return Work(tokens, tokens, pairs, max(r["max_tokens"] for r in requests) - 1)


def seconds(work: Work, shape: Shape, precision: str, ceilings: Mapping[str, float]) -> float:
    """The larger of what arithmetic and what memory takes; int8 rates for weights of 8 bits or fewer, bf16 for attention."""
    rate = 1e9 * ceilings["bf16_gflops" if precision == "bf16" else "int8_gops"]
    products = 2 * (shape.layer_weights * work.tokens + shape.head_weights * work.sampled)
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * work.pairs
    arithmetic = products / rate + attention / (1e9 * ceilings["bf16_gflops"])
    return max(arithmetic, work.steps * weight_bytes(shape, precision) / (1e9 * ceilings["read_gbs"]))


def weight_bytes(shape: Shape, precision: str) -> float:
    layers, head = BITS[precision]
    return (shape.layer_weights * layers + shape.head_weights * head) / 8


def first_tokens(requests: Sequence[Request], rate: float, shape: Shape, precision: str, ceilings: Mapping[str, float]) -> list[float]:
    """Least seconds to each first token where requests arrive as the load client sends them, ``rate`` a second, and prompts are all there is."""
    chance, arrival, free = random.Random(0), 0.0, 0.0
    waits = []
    for request in requests:
        arrival += chance.expovariate(rate)
        free = max(free, arrival) + seconds(prompt_work([request]), shape, precision, ceilings)
        waits.append(free - arrival)
    return waits


def wall(requests: Sequence[Request], shape: Shape, precision: str, ceilings: Mapping[str, float]) -> float:
    """Least seconds of a whole workload. One prompt must end before its output begins; among many requests the phases may overlap."""
    phases = [prompt_work(requests), decode_work(requests)]
    if len(requests) > 1:
        phases = [phases[0] + phases[1]]
    return sum(seconds(work, shape, precision, ceilings) for work in phases)
