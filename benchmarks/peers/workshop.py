"""One folder for environments and models; each is made once, and marked when it is complete."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.common import SHARED
from benchmarks.peers.process import reason

SCRIPTS = SHARED / "bench" / "peers"
"""Runners of the shared benchmarks, called where they lie."""
COMPLETE = ".complete"


class CannotPrepare(Exception):
    """Something could not be installed or made; the message says why."""


class Workshop:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def made(self, name: str, make: Callable[[Path], None]) -> Path:
        """The folder ``name``, filled by ``make`` unless an earlier call completed it."""
        target = self.folder / name
        if not (target / COMPLETE).exists():
            print(f"making {target}", flush=True)
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            make(target)
            (target / COMPLETE).touch()
        return target

    def environment(self, name: str, packages: Iterable[str], without: Iterable[str] = ()) -> Path:
        """A virtual environment with these packages and what they need, less ``without``. It has no pip of its own."""

        def make(target: Path) -> None:
            self.run(f"{name}-install", [sys.executable, "-m", "venv", "--without-pip", str(target)])
            pip = [sys.executable, "-m", "pip", "--python", str(target / "bin" / "python")]
            self.run(f"{name}-install", [*pip, "install", *packages])
            for package in without:
                self.run(f"{name}-install", [*pip, "uninstall", "--yes", package])

        return self.made(name, make)

    def run(self, name: str, argv: list[str]) -> None:
        """Run a command with its output in a log; CannotPrepare where it fails."""
        log = self.logs / f"{name}.log"
        with log.open("w") as file:
            done = subprocess.run(argv, check=False, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise CannotPrepare(f"{Path(argv[0]).name} failed: {reason(log)} (see {log})")


def size_mib(paths: Iterable[Path]) -> int:
    """MiB of files in these folders and of these files, links not counted."""
    files = [f for path in paths for f in ([path] if path.is_file() else path.rglob("*"))]
    return round(sum(f.stat().st_size for f in files if f.is_file() and not f.is_symlink()) / 2**20)
