"""One fresh process per run: its lines as they come, the time to its first token, an end to it after too long."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.results import Record, metrics_of, parse_line, workload_of

TIMEOUT_S = 900.0
OTHER_START = "eq"
"""Workloads whose process starts a server or another model, so that its start is not the one to compare."""


@dataclass(frozen=True)
class Run:
    """A process that measures one engine at one precision on some workloads."""

    engine: str
    precision: str
    workloads: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


def execute(run: Run, log: Path) -> list[Record]:
    """A record for each result, and one with ``why`` for each workload without. All that the process says goes to ``log``."""
    base = {"engine": run.engine, "precision": run.precision}
    start = time.perf_counter()
    records = []
    for line in output_of(run.argv, run.env, log):
        records += [base | record for record in _records(line, run.workloads, time.perf_counter() - start)]
    missing = sorted(set(run.workloads) - {record["workload"] for record in records})
    return records + [base | {"workload": workload, "why": reason(log)} for workload in missing]


def _records(line: dict[str, Any], workloads: str, elapsed: float) -> list[Record]:
    """A line about readiness came when the first token did, unless it says itself when that was."""
    workload = workload_of(line, workloads)
    if workload is not None:
        return [{"workload": workload, "metrics": metrics_of(line, workload), "raw": line}]
    if workloads in OTHER_START:
        return []
    return [{"workload": "start", "metrics": {"first_token_s": round(line.get("first_token_s", elapsed), 3)}, "raw": line}]


def output_of(argv: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[dict[str, Any]]:
    """Run a process and give the results that it prints, each as soon as it is there."""
    with log.open("w") as file:
        process = subprocess.Popen(
            argv, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True
        )
        timer = threading.Timer(TIMEOUT_S, _stop, [process])
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                if (found := parse_line(line)) is not None:
                    yield found
            process.wait()
        finally:
            timer.cancel()
            _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    """End the process and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def reason(log: Path) -> str:
    """The last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line.lower() or "Error" in line or "died" in line]
    return (errors or lines or ["no output"])[-1][:200]
