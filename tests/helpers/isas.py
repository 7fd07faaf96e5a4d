"""The native backend in every form this machine can run, for tests of kernels."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest

from octavo.kernels.backends import describe

if TYPE_CHECKING:
    from octavo.kernels.native import NativeBackend

needs_native = pytest.mark.skipif(not describe()["native"], reason="the native module is not built")


def isas() -> list[str]:
    """Names of the instruction sets to test, best first; none where the native module is not built."""
    if not describe()["native"]:
        return []
    from octavo._native import available_isas

    return list(available_isas())


@cache
def native(isa: str, threads: int = 1) -> NativeBackend:
    from octavo.kernels.native import NativeBackend

    return NativeBackend(threads=threads, isa=isa)
