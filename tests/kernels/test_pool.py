"""The thread pool, the choice of threads and instruction sets, and of a backend."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.kernels import backends, cpus
from octavo.kernels.backends import create_backend, describe
from tests.helpers.isas import isas, needs_native


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_unit_runs_once(threads: int) -> None:
    """``claims`` tells each unit's thread; a unit left out would have -1, one run twice a number past the last thread's."""
    from octavo._native import Pool

    pool = Pool(threads)
    for num_units in [0, 1, 2, 3, 7, 64, 1000, 3, 0, 20000]:
        claims = pool.claims(num_units)
        assert len(claims) == num_units
        assert all(0 <= thread < threads for thread in claims)


@needs_native
def test_every_thread_takes_part() -> None:
    """Each of these jobs ends only when all threads have taken a unit of it."""
    from octavo._native import Pool

    for threads in (1, 2, 4):
        assert Pool(threads).fork_join_seconds(20) > 0


@needs_native
def test_pools_share_a_process_and_threads_share_a_pool() -> None:
    from octavo._native import Pool

    pools = [Pool(2) for _ in range(3)]
    results: list[bool] = []

    def work() -> None:
        for i in range(60):
            results.append(len(pools[i % 3].claims(50)) == 50)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 240 and all(results)


@needs_native
def test_a_forked_child_computes_alone() -> None:
    script = (
        "import os; from octavo._native import Pool; pool = Pool(3); pool.claims(9); pid = os.fork()\n"
        "if pid == 0:\n    assert pool.claims(100) == [0] * 100; del pool; os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7 and len(pool.claims(9)) == 9"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)


@needs_native
def test_an_instruction_set_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.kernels.native import NativeBackend

    names = isas()
    monkeypatch.delenv("OCTAVO_ISA", raising=False)
    assert NativeBackend(threads=1).isa == names[0]
    monkeypatch.setenv("OCTAVO_ISA", "portable")
    assert NativeBackend(threads=1).isa == names[-1] == "portable"
    assert describe(1)["isa"] == "portable"
    monkeypatch.setenv("OCTAVO_ISA", "vax")
    with pytest.raises(ConfigError, match=f"'vax' is not available on this machine; choose one of {', '.join(names)}"):
        NativeBackend(threads=1)
    assert "'vax' is not available" in describe()["problem"]


def test_backends_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert create_backend("reference").name == "reference (NumPy)"
    with pytest.raises(ConfigError, match="choose auto, cpu or reference"):
        create_backend("tpu")
    monkeypatch.setattr(backends, "native_problem", lambda: "it is missing")
    assert create_backend("auto").name == "reference (NumPy)"
    assert describe()["problem"] == "it is missing"
    with pytest.raises(ConfigError, match="needs the native kernels, but it is missing"):
        create_backend("cpu")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_hyperthreads_count_once(tmp_path: Path) -> None:
    for cpu in range(4):
        write(tmp_path / f"cpu{cpu}/topology/thread_siblings_list", f"{cpu % 2},{cpu % 2 + 2}\n")
    assert cpus.physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert cpus.physical_cores({0, 2}, tmp_path) == 1
    assert cpus.physical_cores({7, 8}, tmp_path) == 2  # nothing is known about them


def test_cgroup_v2_quota_is_the_least_of_all_levels(tmp_path: Path) -> None:
    write(tmp_path / "membership", "0::/a/b\n")
    assert cpus.cgroup_cpus(tmp_path, tmp_path / "membership") is None
    write(tmp_path / "a/b/cpu.max", "max 100000\n")
    assert cpus.cgroup_cpus(tmp_path, tmp_path / "membership") is None
    write(tmp_path / "a/cpu.max", "150000 100000\n")
    assert cpus.cgroup_cpus(tmp_path, tmp_path / "membership") == 1.5


def test_cgroup_v1_quota(tmp_path: Path) -> None:
    write(tmp_path / "membership", "4:cpu,cpuacct:/x\n3:memory:/x\n")
    write(tmp_path / "cpu/x/cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "cpu/x/cpu.cfs_period_us", "100000\n")
    assert cpus.cgroup_cpus(tmp_path, tmp_path / "membership") is None
    write(tmp_path / "cpu/x/cpu.cfs_quota_us", "250000\n")
    assert cpus.cgroup_cpus(tmp_path, tmp_path / "membership") == 2.5


def test_default_threads_is_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "physical_cores", lambda cpus: 8)
    for quota, expected in [(None, 8), (3.5, 3), (0.5, 1), (20.0, 8)]:
        monkeypatch.setattr(cpus, "cgroup_cpus", lambda quota=quota: quota)
        assert cpus.default_threads() == expected
