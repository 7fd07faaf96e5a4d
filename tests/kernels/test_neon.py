"""The NEON kernels, cross-built and run under emulation beside the portable ones, which all other tests hold against the reference."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("cmake", "aarch64-linux-gnu-g++", "qemu-aarch64")


@pytest.mark.slow
def test_neon_agrees_with_portable(tmp_path: Path) -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: cmake, g++-aarch64-linux-gnu, qemu-user)")
    options = {
        "CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "aarch64", "CMAKE_CXX_COMPILER": "aarch64-linux-gnu-g++",
        "CMAKE_EXE_LINKER_FLAGS": "-static", "OCTAVO_MODULE": "OFF", "OCTAVO_COMPARE": "ON",
    }  # fmt: skip
    subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path, *(f"-D{key}={value}" for key, value in options.items())], check=True)
    subprocess.run(["cmake", "--build", tmp_path, "--parallel", "2"], check=True)
    result = subprocess.run(["qemu-aarch64", tmp_path / "compare_isas"], check=False, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "neon" in result.stdout
