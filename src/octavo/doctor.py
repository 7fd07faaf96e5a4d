"""``octavo doctor``: what Octavo runs on here, and what is missing, with the fix."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from typing import Any

from octavo import __version__
from octavo.config import KV_DTYPES
from octavo.engine.memory import available_memory, cgroup_limit, format_bytes
from octavo.errors import OctavoError
from octavo.kernels.backends import describe
from octavo.models.locate import locate
from octavo.models.quantised_cache import cache_size
from octavo.models.weight_formats import choose_formats
from octavo.models.weights import open_checkpoint
from octavo.user_cache import cache_directory


def diagnose() -> dict[str, Any]:
    """All facts, and ``problems``: what is missing and how to mend it."""
    kernels = describe()
    limit = cgroup_limit()
    facts: dict[str, Any] = {
        "octavo": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {_affinity()} usable",
        **kernels,
        "kv_dtypes": KV_DTYPES[1:],
        "memory_available": available_memory(),
        "cgroup_limit": None if limit is None else limit[0],
        "gpu": _gpu(),
        "quantised_weights": _quantised_weights(),
        "problems": [],
    }
    try:
        facts["default_model"], facts["default_weights"] = _default_model()
    except OctavoError as error:
        facts["default_model"] = None
        facts["problems"].append(str(error))
    if facts.pop("problem") is not None:
        facts["problems"].append(kernels["problem"])
    return facts


def print_report(facts: dict[str, Any]) -> None:
    """The facts as a table, the problems below it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        if name != "problems":
            table.add_row(name.replace("_", " "), _show(name, value))
    console = Console(soft_wrap=True)
    console.print(table)
    for problem in facts["problems"]:
        console.print(f"[red]problem:[/] {problem}")
    if not facts["problems"]:
        console.print("[green]everything needed is there[/]")


def _default_model() -> tuple[str, str]:
    """Where it is, and the formats that its weights run in by default."""
    path = locate("smollm2-135m")
    checkpoint = open_checkpoint(path)
    return str(path), choose_formats(checkpoint.spec, checkpoint.formats(), "auto", None).describe()


def _quantised_weights() -> str:
    try:
        return f"kept in {cache_directory()}, {format_bytes(cache_size())}"
    except OSError as error:
        return f"not kept: {error}"


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpu() -> str:
    if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd")):
        return "none found"
    torch = "installed" if importlib.util.find_spec("torch") else "not installed"
    return f"found, not used: Octavo runs on the CPU (torch {torch})"


def _show(name: str, value: object) -> str:
    if name in ("memory_available", "cgroup_limit"):
        return "none" if value is None else format_bytes(int(str(value)))
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
