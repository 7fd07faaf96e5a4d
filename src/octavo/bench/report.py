"""Benchmark results as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from octavo.bench.offline import OfflineResult
from octavo.bench.sharing import Saving, Timing


def print_offline(result: OfflineResult, title: str) -> None:
    """One table."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in _rows(result):
        table.add_row(name, value)
    Console().print(table)


def print_savings(savings: Sequence[Saving], title: str) -> None:
    """Memory saved, a line per way of decoding."""
    table = Table(
        title=title, title_justify="left", caption="of the blocks needed without sharing, summed over all steps", caption_justify="left"
    )
    for name in ("lengths", "decoding", "sequences", "requests", "saved", "paper"):
        table.add_column(name, justify="left" if name in ("lengths", "decoding") else "right")
    for s in savings:
        paper = "-" if s.paper is None else f"{s.paper:.1f} %"
        table.add_row(s.dataset, s.kind, str(s.width), str(s.num_requests), f"{100 * s.saved:.1f} %", paper)
    Console().print(table)


def print_timings(timings: Sequence[Timing]) -> None:
    """Time with and without sharing."""
    table = Table(title="with sharing / without, in turns, medians", title_justify="left")
    for name in ("what", "wall", "times faster", "tokens computed"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for t in timings:
        walls, tokens = f"{t.with_sharing:.2f} / {t.without:.2f} s", f"{t.computed_with:,} / {t.computed_without:,}"
        table.add_row(t.name, walls, f"{t.without / t.with_sharing:.2f}", tokens)
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
