"""Files that a simulation is to write, held against what can be written before it begins."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from octavo.errors import ConfigError

FIGURES = (".png", ".svg")
NO_MATPLOTLIB = "figures need matplotlib: pip install 'octavo[plot]'"


def check_outputs(plot: Path | None, html: Path | None) -> None:
    """Raises ConfigError for a figure or a report that could not be written."""
    if plot is not None:
        check_figure(plot)
    if html is not None:
        check_output(html)
    if (plot is not None or html is not None) and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(NO_MATPLOTLIB)


def check_figure(path: Path) -> None:
    """As ``check_output``, and for another suffix than those of figures."""
    if path.suffix not in FIGURES:
        raise ConfigError(f"a figure is written as {' or '.join(FIGURES)}, not {path.name}")
    check_output(path)


def check_output(path: Path) -> None:
    """Raises ConfigError where ``path`` is a folder, lies in none, or must not be written."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}; make it, or name another")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} must not be written by you; name a file in another folder")
