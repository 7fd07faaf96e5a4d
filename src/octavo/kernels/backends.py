"""The choice of a backend, and what ``octavo doctor`` says about it."""

from __future__ import annotations

import importlib
from typing import Any

from octavo.errors import ConfigError
from octavo.kernels.ops import Backend


def create_backend(device: str = "auto", threads: int | None = None, shared_prefix: bool = True) -> Backend:
    """The backend of a device: "cpu" (native), "reference" (NumPy), or "auto": native where it is built.

    Raises ``ConfigError`` where "cpu" was asked for and the native module cannot be loaded.
    """
    if device not in ("auto", "cpu", "reference"):
        raise ConfigError(f"device {device!r} is not known; choose auto, cpu or reference")
    problem = None if device == "reference" else native_problem()
    if device == "cpu" and problem is not None:
        raise ConfigError(f"device 'cpu' needs the native kernels, but {problem}; device 'reference' runs without them, slowly")
    if device == "reference" or problem is not None:
        from octavo.kernels.reference import ReferenceBackend

        return ReferenceBackend()
    from octavo.kernels.native import NativeBackend

    return NativeBackend(threads, shared_prefix=shared_prefix)


def native_problem() -> str | None:
    """Why the native module cannot be used, with the fix; None where it can."""
    try:
        importlib.import_module("octavo._native")
    except ImportError as error:
        return f"octavo._native cannot be loaded ({error}): install a C++20 compiler and reinstall octavo"
    return None


def describe(threads: int | None = None) -> dict[str, Any]:
    """Facts for ``octavo doctor``: native (loaded?), problem (with its fix), isa in use, isas available, threads."""
    facts: dict[str, Any] = {"native": False, "problem": native_problem(), "isa": None, "isas": [], "threads": 1}
    if facts["problem"] is not None:
        return facts
    from octavo import _native
    from octavo.kernels.native import NativeBackend

    facts.update(native=True, isas=_native.available_isas())
    try:
        backend = NativeBackend(threads)
    except ConfigError as error:
        return facts | {"problem": str(error)}
    return facts | {"isa": backend.isa, "threads": backend.threads}
