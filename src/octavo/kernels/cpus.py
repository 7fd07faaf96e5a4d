"""How many CPU cores this process may really use."""

from __future__ import annotations

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")


def default_threads() -> int:
    """Physical cores that the process's affinity and its cgroup's quota allow; at least one."""
    cores = physical_cores(allowed_cpus())
    quota = cgroup_cpus()
    return max(1, cores if quota is None else min(cores, int(quota)))


def allowed_cpus() -> set[int]:
    """Logical CPUs the scheduler may run this process on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def physical_cores(cpus: set[int], root: Path = _CPUS) -> int:
    """Cores behind these logical CPUs: hyperthreads of one core count once."""
    return len({_read(root / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus})


def cgroup_cpus(root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """CPUs' worth of time that cgroup v2 or v1 grants, the least of all levels; None where there is no limit."""
    quotas: list[float] = []
    for line in (_read(membership) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += _each_level(root, path, _v2_quota)
        elif "cpu" in controllers.split(","):
            quotas += _each_level(root / "cpu", path, _v1_quota)
    return min(quotas, default=None)


def _each_level(root: Path, path: str, quota: object) -> list[float]:
    """The quota of a group and of all above it; a container sees its own group as the root, whatever the path says."""
    assert callable(quota)
    group = root / path.strip("/")
    levels = [group, *group.parents]
    found = [quota(level) for level in levels if level == root or root in level.parents]
    return [value for value in found if value is not None]


def _v2_quota(group: Path) -> float | None:
    fields = (_read(group / "cpu.max") or "max").split()
    return None if fields[0] == "max" else int(fields[0]) / int(fields[1])


def _v1_quota(group: Path) -> float | None:
    quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return None if quota is None or period is None or int(quota) <= 0 else int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
