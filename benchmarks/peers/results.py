"""What the runners of the shared benchmarks print, as records: one per workload and repetition."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

Record = dict[str, Any]
"""``engine``, ``precision``, ``workload``, ``metrics`` (name -> number); or ``why`` in place of ``metrics`` where there is no result."""

NAMES = {"ttft_p50_ms": "ttft_ms", "tpot_p50_ms": "tpot_ms"}
KEPT = ("wall", "ttft_ms", "ttft_p99_ms", "tpot_ms", "tpot_p99_ms", "decode_tps", "peak_rss_mib")
LETTERS = {"k": "c"}
"""OpenVINO's runner calls workload C with its first request alone K."""


def parse_line(line: str) -> dict[str, Any] | None:
    """The object in ``RESULT {json}`` or ``{json}``, the words of ``READY … ready_s X first_token_s Y``; None for any other line."""
    text = line.strip().removeprefix("RESULT ")
    if text.startswith("{"):
        try:
            return dict(json.loads(text))
        except json.JSONDecodeError:
            return None
    words = text.split()
    if words[:1] == ["READY"] and "first_token_s" in words:
        return {"first_token_s": float(words[words.index("first_token_s") + 1])}
    return None


def metrics_of(line: Mapping[str, Any], workload: str) -> dict[str, float]:
    """The numbers of a line that are kept, under one name each."""
    found = {NAMES.get(name, name): value for name, value in line.items()}
    if "walls" in found:
        found["wall"] = statistics.median(found["walls"])
    if workload == "e":
        found.pop("decode_tps", None)
    return {name: float(found[name]) for name in KEPT if name in found}


def workload_of(line: Mapping[str, Any], workloads: str) -> str | None:
    """Which of a run's workloads a line is about; None where it only says that an engine is ready."""
    if "wall" not in line and "walls" not in line:
        return None
    return workloads if len(workloads) == 1 else LETTERS.get(line["workload"], line["workload"])


def medians(records: Iterable[Record]) -> dict[tuple[str, str, str, str], float]:
    """(workload, metric, engine, precision) -> the median over all records."""
    values: dict[tuple[str, str, str, str], list[float]] = {}
    for record in records:
        for metric, value in record.get("metrics", {}).items():
            values.setdefault((record["workload"], metric, record["engine"], record["precision"]), []).append(value)
    return {key: statistics.median(found) for key, found in values.items()}


def failures(records: Iterable[Record]) -> dict[tuple[str, str, str], str]:
    """(engine, precision, why) -> the workloads that have no result for that reason."""
    found: dict[tuple[str, str, str], set[str]] = {}
    for record in records:
        if "why" in record:
            found.setdefault((record["engine"], record["precision"], record["why"]), set()).add(record["workload"].upper())
    return {key: "".join(sorted(letters)) for key, letters in found.items()}
