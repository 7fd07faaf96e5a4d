"""``octavo bench offline``: all requests at once, through the offline interface."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.bench.workloads import BenchRequest
from octavo.engine.outputs import RequestOutput
from octavo.llm import LLM, Report
from octavo.request import SamplingParams


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """Figures of one run. Times in seconds."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    wall: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft: dict[str, float]
    """Time to first token, by percentile; all requests arrive at the start."""
    tpot: dict[str, float]
    """Time per output token after the first, by percentile."""
    max_num_running: int
    num_preemptions: int
    kv_blocks_total: int
    kv_blocks_max_used: int
    waste: dict[str, Any]
    """Shares of the used slots that held no token, as ``LLM.stats`` tells them."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_offline(llm: LLM, requests: Sequence[BenchRequest], report: Report | None = None) -> OfflineResult:
    """Run a workload greedily, every request to its full length."""
    params = [SamplingParams(temperature=0.0, max_tokens=r.max_tokens, ignore_eos=True, n=r.n) for r in requests]
    start = time.perf_counter()
    outputs = llm.generate([list(r.prompt) for r in requests], params, report=report)
    wall = time.perf_counter() - start
    num_prompt = sum(len(r.prompt) for r in requests)
    num_output = sum(len(sample.token_ids) for o in outputs for sample in o.outputs)
    stats = llm.stats()
    return OfflineResult(
        num_requests=len(requests),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        wall=wall,
        output_tokens_per_second=num_output / wall,
        total_tokens_per_second=(num_prompt + num_output) / wall,
        ttft=percentiles([x for x in map(_ttft, outputs) if x is not None]),
        tpot=percentiles([x for x in map(_tpot, outputs) if x is not None]),
        max_num_running=stats["max_num_running"],
        num_preemptions=stats["num_preemptions"],
        kv_blocks_total=stats["blocks"]["total"],
        kv_blocks_max_used=stats["blocks"]["max_used"],
        waste=stats["waste"],
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The 50th, 90th and 99th percentile, each the smallest value that so many per cent do not exceed.

    >>> percentiles([1.0, 2.0, 3.0, 4.0])
    {'p50': 2.0, 'p90': 4.0, 'p99': 4.0}
    """
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in (50, 90, 99)}


def _ttft(output: RequestOutput) -> float | None:
    m = output.metrics
    return None if m is None or m.first_token_time is None else m.first_token_time - m.arrival_time


def _tpot(output: RequestOutput) -> float | None:
    m, num_tokens = output.metrics, len(output.outputs[0].token_ids)
    if m is None or m.finish_time is None or m.first_token_time is None or num_tokens < 2:
        return None
    return (m.finish_time - m.first_token_time) / (num_tokens - 1)
