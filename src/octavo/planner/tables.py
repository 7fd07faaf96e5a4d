"""Figures of a simulation as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.memory import format_bytes


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns under a header; numbers to the right.

    >>> print(table(["name", "share"], [["a", 0.5], ["long", 12]]))
    name  share
    ----  -----
    a       0.5
    long     12
    """
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(str(head)), *(len(row[i]) for row in texts)) if texts else len(head) for i, head in enumerate(header)]
    lines = [[head.ljust(w) for head, w in zip(header, widths, strict=True)], ["-" * w for w in widths]]
    for row, cells in zip(rows, texts, strict=True):
        lines.append([c.rjust(w) if isinstance(v, int | float) or v is None or _is_share(c) else c.ljust(w)
                      for v, c, w in zip(row, cells, widths, strict=True)])  # fmt: skip
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _is_share(text: str) -> bool:
    return text.endswith("%") and text[:-1].strip().replace(".", "").replace(",", "").isdigit()


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


def comparison(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Runs side by side: speed, memory, and what it costs to keep books of it."""
    speed = [
        "run",
        "req/s",
        "out tok/s",
        "goodput",
        "TTFT p50",
        "p90",
        "p99",
        "TPOT p50",
        "p90",
        "end p50",
        "p99",
        "batch",
        "preempt",
        "hit rate",
    ]
    memory = ["run", "used", "reserved", "internal", "external", "free", "cached", "shared", "saved by sharing", "copied", "stalls"]
    books = ["run", "table entries", "tables, mean", "pool", "prefix index", "of KV memory", "attention, us/1k keys"]
    if not any("attention" in s for s in summaries.values()):
        books.pop()
    parts = [
        table(speed, [_speed_row(name, s) for name, s in summaries.items()]),
        "Shares of the KV memory, averaged over time (while requests waited, where any did):",
        table(memory, [_memory_row(name, s) for name, s in summaries.items()]),
        "Metadata: block table entries of a running request; bytes of block tables, pool and prefix index:",
        table(books, [_books_row(name, s)[: len(books)] for name, s in summaries.items()]),
    ]
    return "{}\n\n{}\n{}\n\n{}\n{}".format(*parts)


def _speed_row(name: str, s: Mapping[str, Any]) -> list[object]:
    t = s["throughput"]
    return [
        name, t["requests_per_second"], t["output_tokens_per_second"], t["goodput"], *(s["ttft"].get(p) for p in ("p50", "p90", "p99")),
        *(s["tpot"].get(p) for p in ("p50", "p90")), *(s["latency"].get(p) for p in ("p50", "p99")), s["batch"]["mean"], s["preemptions"],
        f"{s['prefix']['hit_rate']:.1%}",
    ]  # fmt: skip


def _memory_row(name: str, s: Mapping[str, Any]) -> list[object]:
    shares = s["memory"]["pressed" if s["memory"]["pressed_seconds"] else "all"]
    kinds = ("used", "reserved", "internal", "external", "free", "cached", "shared")
    copies = s["copies"]
    copied = f"{copies['slots_copied']:,} slots" if copies["bytes_copied"] is None else format_bytes(copies["bytes_copied"])
    return [name, *(f"{shares[k]:.1%}" for k in kinds), f"{s['memory']['saved_by_sharing']:.1%}", copied, copies["stalls"]]


def _books_row(name: str, s: Mapping[str, Any]) -> list[object]:
    m = s["metadata"]
    sizes = (m["table_bytes"], m["pool_bytes"], m["index_bytes"])
    share = "-" if m["share_of_kv_memory"] is None else f"{m['share_of_kv_memory']:.2%}"
    attention = s.get("attention", {}).get("us_per_1000_keys")
    return [name, m["table_entries_per_request"], *(format_bytes(round(size)) for size in sizes), share, attention]


def describe_refusals(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """How many requests were refused, and why; run by run where that differs.

    >>> describe_refusals({"paged": {"refusals": {"longer than 8,192 tokens": 3}}, "oracle": {"refusals": {"longer than 8,192 tokens": 3}}})
    '3 refused: longer than 8,192 tokens'
    >>> describe_refusals({"1GiB": {"refusals": {"too long": 3, "too wide": 1}}, "2GiB": {"refusals": {}}})
    '1GiB: 3 refused: too long, 1 refused: too wide; 2GiB: 0 refused'
    """
    told = {
        name: ", ".join(f"{count:,} refused: {why}" for why, count in run["refusals"].items()) or "0 refused"
        for name, run in summaries.items()
    }
    return next(iter(told.values())) if len(set(told.values())) == 1 else "; ".join(f"{name}: {text}" for name, text in told.items())
