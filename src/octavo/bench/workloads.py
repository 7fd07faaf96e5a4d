"""Workloads for benchmarks: seeded random lengths, a trace of lengths, or a JSON list of prompts."""

from __future__ import annotations

import csv
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: token ids in, how many tokens to generate, and how often."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1


def random_workload(count: int, input_len: int, output_len: int, vocab_size: int, seed: int) -> list[BenchRequest]:
    """``count`` requests with lengths uniform within half of the means and random tokens.

    >>> random_workload(1, 4, 2, 100, 0) == random_workload(1, 4, 2, 100, 0)
    True
    """
    chance = random.Random(seed)
    return [
        _request(chance, _around(chance, input_len), _around(chance, output_len), vocab_size) for _ in range(count)
    ]  # fmt: skip


def trace_workload(path: Path, count: int, longest: int, vocab_size: int, seed: int) -> list[BenchRequest]:
    """The first ``count`` requests of a CSV trace with columns ContextTokens and GeneratedTokens, with random tokens.

    Requests of more than ``longest`` tokens are cut to fit: the prompt first.
    """
    chance = random.Random(seed)
    requests: list[BenchRequest] = []
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            if len(requests) == count:
                break
            try:
                prompt_len, output_len = int(line["ContextTokens"]), int(line["GeneratedTokens"])
            except (KeyError, TypeError, ValueError):
                raise ConfigError(f"{path} is not a trace: each line needs the integers ContextTokens and GeneratedTokens") from None
            output_len = max(1, min(output_len, longest - 1))
            requests.append(_request(chance, max(1, min(prompt_len, longest - output_len)), output_len, vocab_size))
    return requests


def json_workload(path: Path) -> list[BenchRequest]:
    """A JSON list of ``{"prompt": [token ids], "max_tokens": count}``, each with ``"n": samples`` if wanted."""
    try:
        items = json.loads(path.read_text())
        if not isinstance(items, list) or not items:
            raise ValueError("no requests")
        return [_from_json(item) for item in items]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f'{path} is not a workload: it must be a JSON list of {{"prompt": [token ids], "max_tokens": count}} ({error})'
        ) from error


def _from_json(item: dict[str, Any]) -> BenchRequest:
    return BenchRequest(tuple(item["prompt"]), int(item["max_tokens"]), int(item.get("n", 1)))


def spread_lengths(count: int, mean: float, longest: int) -> list[int]:
    """``count`` lengths that stand for an exponential distribution with this mean: its quantiles, cut to 1 .. ``longest``.

    >>> spread_lengths(4, 20.0, 100)
    [3, 9, 20, 42]
    """
    return [max(1, min(longest, round(-mean * math.log(1 - (i + 0.5) / count)))) for i in range(count)]


def _around(chance: random.Random, mean: int) -> int:
    return max(1, chance.randint(mean - mean // 2, mean + mean // 2))


def _request(chance: random.Random, prompt_len: int, output_len: int, vocab_size: int) -> BenchRequest:
    return BenchRequest(tuple(chance.randrange(vocab_size) for _ in range(prompt_len)), output_len)
