"""Where Octavo keeps what it made for this user: quantised weights, and profiles of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """$OCTAVO_CACHE, or octavo in $XDG_CACHE_HOME or ~/.cache. Raises ``OSError`` where there is no home either."""
    if chosen := os.environ.get("OCTAVO_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "octavo"
    except RuntimeError as error:
        raise FileNotFoundError(f"{error}; set OCTAVO_CACHE to a directory") from error
