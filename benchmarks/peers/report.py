"""Results as Markdown for docs/performance.md: ``python -m benchmarks.peers.report RESULTS.json``."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import SHARED
from benchmarks.peers import limits
from benchmarks.peers.engines.base import RATE
from benchmarks.peers.results import failures, medians

COLUMNS = {"bf16": "bf16", "int8": "8 bit", "int4": "4 bit"}
Ceilings = Mapping[str, float]
Workloads = Mapping[str, Sequence[limits.Request]]
Limit = Callable[[Workloads, str, Ceilings], float]
Medians = Mapping[tuple[str, str, str, str], float]


def _wall(letter: str, shape: str = "smollm2") -> Limit:
    return lambda work, precision, ceilings: limits.wall(work[letter], limits.SHAPES[shape], precision, ceilings)


def _decode_rate(work: Workloads, precision: str, ceilings: Ceilings) -> float:
    decode = limits.decode_work(work["b"])
    return decode.steps / limits.seconds(decode, limits.SHAPES["smollm2"], precision, ceilings)


def _first_token(work: Workloads, precision: str, ceilings: Ceilings) -> float:
    return 1e3 * limits.seconds(limits.prompt_work(work["b"]), limits.SHAPES["smollm2"], precision, ceilings)


def _queued(share: float) -> Limit:
    """A quantile, taken as the load client takes it."""

    def limit(work: Workloads, precision: str, ceilings: Ceilings) -> float:
        waits = sorted(limits.first_tokens(work["a"], float(RATE), limits.SHAPES["smollm2"], precision, ceilings))
        return 1e3 * waits[min(len(waits) - 1, int(share * len(waits)))]

    return limit


@dataclass(frozen=True)
class Metric:
    """One number per engine and precision."""

    workload: str
    name: str
    title: str
    limit: Limit | None = None
    more_is_better: bool = False

    def best(self, values: Sequence[float]) -> float:
        return max(values) if self.more_is_better else min(values)

    def ratio(self, better: float, worse: float) -> float:
        """How many times ``better`` is as good as ``worse``."""
        return better / worse if self.more_is_better else worse / better


METRICS = (
    Metric("a", "wall", "A: 64 requests at once, 14,012 + 7,622 tokens, s", _wall("a")),
    Metric("b", "decode_tps", "B: one stream, 128 + 128, decode, tokens/s", _decode_rate, more_is_better=True),
    Metric("b", "ttft_ms", "B: time to first token, ms", _first_token),
    Metric("c", "wall", "C: 512 shared + 64 × 32 own, 32 out, s", _wall("c")),
    Metric("d", "wall", "D: n = 8, prompt 256, 64 out each, s", _wall("d")),
    Metric("e", "ttft_ms", "E: A at 2.0/s over HTTP, time to first token p50, ms", _queued(0.5)),
    Metric("e", "ttft_p99_ms", "E: time to first token p99, ms", _queued(0.99)),
    Metric("e", "tpot_ms", "E: time per output token p50, ms"),
    Metric("e", "tpot_p99_ms", "E: time per output token p99, ms"),
    Metric("q", "wall", "A at 0.5B (random weights of Qwen2.5-0.5B's shape), s", _wall("a", "qwen")),
    Metric("start", "first_token_s", "process start to first token, s"),
    Metric("a", "peak_rss_mib", "peak memory in A, MiB"),
)


def number(value: float) -> str:
    """Three digits that count.

    >>> [number(v) for v in (0.5149, 12.34, 1234.5)]
    ['0.51', '12.3', '1,234']
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def is_ours(engine: str) -> bool:
    return engine.startswith("Octavo")


def block(
    metric: Metric, found: Medians, engines: Sequence[str], bounds: Sequence[float | None], precisions: Sequence[str]
) -> list[list[str]]:
    """The rows of one metric: its limit, each engine that has it, and how far Octavo is ahead of the best peer."""
    values = {e: [found.get((metric.workload, metric.name, e, p)) for p in precisions] for e in engines}
    values = {engine: row for engine, row in values.items() if any(value is not None for value in row)}
    if not values:
        return []
    rows = [["limit", *map(number, filter(None, bounds))]] if all(bounds) else []
    rows += [[engine, *(_cell(metric, value, bound) for value, bound in zip(row, bounds, strict=True))] for engine, row in values.items()]
    ahead = [_ahead(metric, {engine: row[i] for engine, row in values.items()}) for i in range(len(precisions))]
    if any(ahead):
        rows.append(["**Octavo ahead of the best peer**", *(f"**{number(a)} ×**" if a else "" for a in ahead)])
    return [[metric.title if i == 0 else "", *row] for i, row in enumerate(rows)]


def _cell(metric: Metric, value: float | None, bound: float | None) -> str:
    if value is None:
        return ""
    return number(value) + (f" ({metric.ratio(value, bound):.0%})" if bound else "")


def _ahead(metric: Metric, column: Mapping[str, float | None]) -> float | None:
    ours = [v for engine, v in column.items() if v is not None and is_ours(engine)]
    theirs = [v for engine, v in column.items() if v is not None and not is_ours(engine)]
    return metric.ratio(metric.best(ours), metric.best(theirs)) if ours and theirs else None


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ceilings_of(measured: Sequence[Ceilings]) -> dict[str, float]:
    """Medians; empty where this machine cannot run limits.cpp."""
    names = measured[0] if measured else ()
    return {name: statistics.median(m[name] for m in measured) for name in names}


def scheduler_table(found: Mapping[str, Any]) -> str:
    parts = {"schedule": "schedule, blocks included", "commit": "commit", "step": "**both**"}
    cells = [[f"{found[e][part][q]:.0f}" for e in ("octavo", "vllm") for q in ("median_us", "p99_us")] for part in parts]
    ratios = [f"{found['octavo'][part]['median_us'] / found['vllm'][part]['median_us']:.0%}" for part in parts]
    rows = [[title, f"{c[0]} ({c[1]})", f"{c[2]} ({c[3]})", r] for title, c, r in zip(parts.values(), cells, ratios, strict=True)]
    return table(["256 running, prefix cache on, median (p99) µs", "Octavo", "vLLM", "Octavo's share"], rows)


def markdown(document: Mapping[str, Any], workloads: Workloads) -> str:
    """Tables, and below them what they were measured with."""
    records, ceilings = document["records"], ceilings_of(document["limits"])
    engines, precisions = [e["name"] for e in document["engines"]], document["precisions"]
    found = medians(records)
    rows = []
    for metric in METRICS:
        bounds = [metric.limit(workloads, p, ceilings) if metric.limit and ceilings else None for p in precisions]
        rows += block(metric, found, engines, bounds, precisions)
    parts = [
        f"{document['machine']}, {document['date']}. Medians of {document['repeats']}, in turns; E, A at 0.5B, and llama.cpp's A and C once.",
        _limits(ceilings),
        table(["", "", *(COLUMNS[p] for p in precisions)], rows),
        "\n".join(_about(engine) for engine in document["engines"]),
    ]
    if missing := failures(records):
        lines = [
            f"- {engine}, {COLUMNS[precision]}{letters and ' ' + letters}: {why}" for (engine, precision, why), letters in missing.items()
        ]
        parts.append("Without a result:\n\n" + "\n".join(lines))
    if "scheduler" in document:
        parts.append(scheduler_table(document["scheduler"]))
    return "\n\n".join(parts) + "\n"


def _limits(ceilings: Ceilings) -> str:
    if not ceilings:
        return "This machine cannot run limits.cpp, so that limits are left out."
    rates = (
        f"{ceilings['bf16_gflops']:,.0f} GFLOP/s in bf16, {ceilings['int8_gops']:,.0f} GOP/s in int8, {ceilings['read_gbs']:.1f} GB/s read"
    )
    return f"Limits from {rates}, medians of the same run; in brackets the share of the limit."


def _about(engine: Mapping[str, Any]) -> str:
    size = f" Installed: {engine['installed_mib']:,} MiB." if "installed_mib" in engine else ""
    return f"- {engine['name']} {engine.get('version', '')}: {engine['settings']}.{size}"


def load_workloads() -> Workloads:
    return {letter: json.loads((SHARED / "bench" / f"workload_{letter}.json").read_text()) for letter in "abcd"}


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text()), load_workloads()), end="")
