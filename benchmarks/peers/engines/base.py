"""What the harness asks of an engine, and what the engines share."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from benchmarks.common import SHARED
from benchmarks.peers.process import Run

WORKLOADS = str(SHARED / "bench")
RATE = "2.0"
"""Requests a second in workload E."""


class Engine(Protocol):
    name: str
    workloads: str
    """Letters of those that it can run; E only where it has a server."""
    once: str
    """Those of its workloads that only the first round runs, since they are long."""
    precisions: tuple[str, ...]
    settings: str
    """What the tables say of how it was run."""

    def install(self) -> None:
        """Make its environment. Raises CannotPrepare, which says why that is impossible."""

    def version(self) -> str: ...

    def installed_mib(self) -> int:
        """Size of what it needs to run, without Python, pip and models."""

    def prepare(self, precision: str, workloads: str) -> None:
        """Make the models that its runs read. Raises CannotPrepare."""

    def runs(self, precision: str, workloads: str) -> Iterator[Run]:
        """The processes that measure these workloads once."""


def repeated(workloads: str, times: str) -> str:
    """The workloads of one process, short ones as often as they stand in ``times``.

    >>> repeated("adq", "abbbccddd")
    'addd'
    """
    return "".join(letter for letter in times if letter in workloads)


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def version_in(environment: Path, package: str) -> str:
    """The version of an installed package, asked of that environment's Python."""
    code = f"import importlib.metadata, json; print(json.dumps(importlib.metadata.version({package!r})))"
    done = subprocess.run([environment / "bin" / "python", "-c", code], check=True, capture_output=True, text=True)
    return str(json.loads(done.stdout))
