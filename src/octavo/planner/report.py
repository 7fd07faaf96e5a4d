"""Figures of a simulation as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.planner.accounting import KINDS, merged
from octavo.planner.replica import Record, ReplicaFigures
from octavo.planner.simulate import SimResult
from octavo.planner.timeline import Moment, together
from octavo.planner.workload import Run, SimRequest, output_token

BLOCK_ID_BYTES = 4
"""Of an entry of a block table."""
POOL_BYTES = 12
"""Of a block in the pool: its count, and two links of the free list."""
ENTRY_BYTES, TOKEN_BYTES = 450, 4
"""Of a block that can be found, and of each of its tokens: the entry, its key, and its places in three dictionaries, as CPython
3.11 has them (``test_report.py`` measures it)."""


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """The 50th, 90th and 99th percentile: each the smallest value that so many per cent do not exceed; and the mean.

    >>> percentiles([4.0, 1.0, 3.0, 2.0])
    {'p50': 2.0, 'p90': 4.0, 'p99': 4.0, 'mean': 2.5}
    """
    ordered = sorted(values)
    if not ordered:
        return {}
    found = {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in (50, 90, 99)}
    return found | {"mean": sum(ordered) / len(ordered)}


def ttft(record: Record) -> float | None:
    """Seconds from arrival to the first token."""
    m = record.metrics
    return None if m is None or m.first_token_time is None else m.first_token_time - record.arrival


def tpot(record: Record) -> float | None:
    """Seconds per output token of a sample after the first."""
    m = record.metrics
    num_output = record.num_output // record.request.n
    if m is None or m.first_token_time is None or m.finish_time is None or num_output < 2:
        return None
    return (m.finish_time - m.first_token_time) / (num_output - 1)


def latency(record: Record) -> float | None:
    """Seconds from arrival to the last token."""
    m = record.metrics
    return None if m is None or m.finish_time is None or not record.completed else m.finish_time - record.arrival


def summarise(result: SimResult, max_ttft: float = 2.0, max_tpot: float = 0.2, kv_bytes_per_token: int | None = None) -> dict[str, Any]:
    """All figures. ``goodput`` counts completed requests that kept both limits, in seconds."""
    records, seconds = result.records, max(result.seconds, 1e-9)
    completed = [record for record in records if record.completed]
    num_output = sum(record.num_output for record in records)
    stats = [replica.stats for replica in result.replicas]
    return {
        "scheme": result.config.scheme,
        "block_size": result.config.block_size if result.config.scheme == "paged" else None,
        "num_replicas": len(result.replicas),
        "requests": _counts(records),
        "refusals": dict(sorted(Counter(record.refusal for record in records if record.refusal).items())),
        "seconds": seconds,
        "throughput": {
            "requests_per_second": len(completed) / seconds,
            "output_tokens_per_second": num_output / seconds,
            "prompt_tokens_per_second": sum(r.request.prompt_len for r in completed) / seconds,
            "goodput": sum(_kept(record, max_ttft, max_tpot) for record in completed) / seconds,
        },
        "ttft": percentiles(x for x in map(ttft, records) if x is not None),
        "tpot": percentiles(x for x in map(tpot, records) if x is not None),
        "latency": percentiles(x for x in map(latency, records) if x is not None),
        "memory": memory_shares(result.replicas),
        "batch": _batch(result.replicas),
        "preemptions": sum(s["num_preemptions"] for s in stats),
        "tokens_computed": sum(s["num_tokens_computed"] for s in stats) + sum(r.counts.num_leapt_tokens for r in result.replicas),
        "steps": sum(r.counts.num_steps for r in result.replicas),
        "prefix": prefix_figures(stats),
        "metadata": _metadata(result, kv_bytes_per_token),
        "copies": _copies(result.replicas, kv_bytes_per_token),
    }


def _counts(records: Sequence[Record]) -> dict[str, int]:
    reasons = [record.reason for record in records]
    return {
        "all": len(records),
        "completed": reasons.count("length"),
        "given_up": reasons.count("abort"),
        "refused": reasons.count("refused"),
    }


def _kept(record: Record, max_ttft: float, max_tpot: float) -> bool:
    first, following = ttft(record), tpot(record)
    return first is not None and first <= max_ttft and (following is None or following <= max_tpot)


def memory_shares(replicas: Sequence[ReplicaFigures]) -> dict[str, Any]:
    """Shares of all slots by kind: over all steps, and over those in which requests waited."""
    every, pressed = (merged([getattr(r.counts, name) for r in replicas]) for name in ("every", "pressed"))
    return {"all": every.shares(), "pressed": pressed.shares(), "pressed_seconds": pressed.seconds, "saved_by_sharing": every.saved}


def _batch(replicas: Sequence[ReplicaFigures]) -> dict[str, float]:
    every, pressed = (merged([getattr(r.counts, name) for r in replicas]) for name in ("every", "pressed"))
    return {"mean": every.mean_running, "mean_pressed": pressed.mean_running, "max": every.max_running}


def prefix_figures(stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Tokens found in the prefix cache, of those looked for."""
    found = [s.get("prefix_cache", {}) for s in stats]
    asked, saved = (sum(f.get(name, 0) for f in found) for name in ("tokens_asked", "tokens_saved"))
    return {"tokens_asked": asked, "tokens_saved": saved, "hit_rate": saved / asked if asked else 0.0}


def _metadata(result: SimResult, kv_bytes_per_token: int | None) -> dict[str, Any]:
    """Cost of the books of all replicas: block tables of running requests (means over steps), the pool, and the prefix index at the end."""
    counts = [r.counts for r in result.replicas]
    entries, steps = sum(c.num_table_entries for c in counts), sum(c.num_steps for c in counts)
    paged = result.config.scheme == "paged"
    blocks = sum(r.stats["blocks"]["total"] for r in result.replicas) if paged else 0
    size = result.config.block_size
    tables = BLOCK_ID_BYTES * entries / max(1, steps) * len(result.replicas)
    pool, index = POOL_BYTES * blocks, sum(r.num_entries for r in result.replicas) * (ENTRY_BYTES + TOKEN_BYTES * size)
    kv = None if kv_bytes_per_token is None else kv_bytes_per_token * result.config.num_slots * len(result.replicas)
    return {
        "table_entries_per_request": entries / max(1, sum(c.num_rows for c in counts)),
        "table_bytes": tables,
        "pool_bytes": pool,
        "index_bytes": index,
        "share_of_kv_memory": (tables + pool + index) / kv if kv else None,
    }


def _copies(replicas: Sequence[ReplicaFigures], kv_bytes_per_token: int | None) -> dict[str, int | None]:
    """Of growing regions: what they copied, and how often one had to grow and could not."""
    slots = sum(r.num_slots_copied for r in replicas)
    return {
        "slots_copied": slots,
        "bytes_copied": None if kv_bytes_per_token is None else slots * kv_bytes_per_token,
        "stalls": sum(r.num_stalls for r in replicas),
    }


def timeline(result: SimResult) -> list[Moment]:
    """The memory of all replicas together, over time."""
    return together([r.counts.timeline for r in result.replicas]).moments()


def timeline_columns(result: SimResult) -> dict[str, list[float]]:
    """``timeline`` by column: the middle of each span in seconds, requests running, and the share of all slots of each kind and ``shared``."""
    moments = timeline(result)
    columns = {kind: [moment.shares[kind] for moment in moments] for kind in KINDS}
    rest = {"seconds": [m.time for m in moments], "running": [m.running for m in moments], "shared": [m.shared for m in moments]}
    return rest | columns


def unlimited_hit_rate(requests: Iterable[SimRequest]) -> float:
    """The prefix hit rate that a cache without limits, shared by all, would have had: the upper bound.

    Counts for each request, in the order given (which is that of arrival, but for next turns, and those come after what they go on from),
    the longest beginning that any earlier prompt with its answer had; at most all but its last token, as the engine computes that always.
    """
    known = _KnownRuns()
    found = asked = 0
    for request in requests:
        asked += request.prompt_len - 1
        found += min(known.walk(request.prompt), request.prompt_len - 1)
        for sample in range(request.n):
            known.walk((*request.prompt, Run(output_token(request.id, sample), request.output_len)))
    return found / asked if asked else 0.0


class _KnownRuns:
    """All beginnings there have been, as a tree of runs."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int, int], int] = {}
        self._longest: dict[tuple[int, int], int] = {}
        """Of the runs of a token that follow a node."""

    def walk(self, runs: Sequence[Run]) -> int:
        """Returns how many tokens are known of these runs, and adds what is not."""
        node, hit, known = 0, 0, True
        for run in runs:
            key, place = (node, run.token, run.length), (node, run.token)
            longest = self._longest.get(place, 0)
            hit += min(longest, run.length) if known else 0
            known = known and key in self._nodes
            self._longest[place] = max(longest, run.length)
            node = self._nodes.setdefault(key, len(self._nodes) + 1)
        return hit
