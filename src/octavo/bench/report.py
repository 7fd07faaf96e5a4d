"""Benchmark results as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from octavo.bench.offline import OfflineResult


def print_offline(result: OfflineResult, title: str) -> None:
    """One table."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in _rows(result):
        table.add_row(name, value)
    Console().print(table)


def _rows(r: OfflineResult) -> list[tuple[str, str]]:
    waste = r.waste
    return [
        ("requests", f"{r.num_requests:,}"),
        ("prompt + output tokens", f"{r.num_prompt_tokens:,} + {r.num_output_tokens:,}"),
        ("wall", f"{r.wall:.2f} s"),
        ("output tokens/s", f"{r.output_tokens_per_second:,.1f}"),
        ("all tokens/s", f"{r.total_tokens_per_second:,.1f}"),
        ("time to first token, p50 / p90 / p99", _milliseconds(r.ttft)),
        ("time per output token, p50 / p90 / p99", _milliseconds(r.tpot)),
        ("most requests in one step", f"{r.max_num_running:,}"),
        ("preemptions", f"{r.num_preemptions:,}"),
        ("KV blocks used at most", f"{r.kv_blocks_max_used:,} of {r.kv_blocks_total:,}"),
        (
            "KV slots reserved in vain (internal waste)",
            f"{waste['internal']:.2%} of those held, at most {waste['max_slots_per_request']} per request",
        ),
    ]


def _milliseconds(values: dict[str, float]) -> str:
    return " / ".join(f"{1e3 * v:,.1f}" for v in values.values()) + " ms" if values else "-"
