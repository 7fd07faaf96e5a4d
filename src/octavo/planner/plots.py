"""Figures by matplotlib, loaded only here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from octavo.errors import ConfigError
from octavo.planner.accounting import KINDS
from octavo.planner.output_files import NO_MATPLOTLIB, check_figure
from octavo.planner.paper import PAPER, PaperStudy
from octavo.planner.report import timeline
from octavo.planner.studies import StudyResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

COLOURS = {"used": "#2b6cb0", "reserved": "#90cdf4", "internal": "#ed8936", "external": "#c53030", "free": "#e2e8f0"}


def write_plot(result: StudyResult, path: Path) -> None:
    """A figure of all runs: memory by kind, memory over time, speed. ``path`` ends in .png or .svg."""
    _save(overview(result), path)


def plot_paper(study: PaperStudy, path: Path) -> None:
    """The paper's figure 2, with its own bars beside ours. ``path`` ends in .png or .svg."""
    _save(paper_figure(study), path)


def paper_figure(study: PaperStudy) -> Figure:
    """The bars of the paper's figure 2, and ours."""
    figure = _figure(8, 4.5)
    axes = figure.subplots()
    bars = {scheme: row for scheme, row in study.rows.items() if scheme in PAPER}
    names = [label for scheme in bars for label in (_label(scheme), f"{_label(scheme)}\n(paper)")]
    rows = [row for scheme in bars for row in (bars[scheme], PAPER[scheme])]
    _stack(axes, names, rows)
    axes.set_xticks(range(len(names)), names, rotation=0, ha="center")
    axes.set_title("KV memory by kind, beside arXiv 2309.06180, figure 2")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS), fontsize=8, frameon=False)
    return figure


SWEPT: dict[str, Callable[[dict[str, Any]], float]] = {
    "waste, % of the memory": lambda s: (
        100 * (s["memory"]["all"]["reserved"] + s["memory"]["all"]["internal"] + s["memory"]["all"]["external"])
    ),
    "table entries per request": lambda s: s["metadata"]["table_entries_per_request"],
    "metadata, % of the KV memory": lambda s: 100 * s["metadata"]["share_of_kv_memory"],
    "attention, µs per 1,000 keys (measured)": lambda s: s["attention"]["us_per_1000_keys"],
    "prompt tokens found in the prefix cache": lambda s: s["prefix"]["tokens_saved"],
    "shared slots, % of the memory": lambda s: 100 * s["memory"]["all"]["shared"],
    "output tokens per second": lambda s: s["throughput"]["output_tokens_per_second"],
    "goodput, requests per second": lambda s: s["throughput"]["goodput"],
    "preemptions": lambda s: s["preemptions"],
}


def overview(result: StudyResult) -> Figure:
    """One figure of a study: a sweep's lines, or its runs side by side."""
    what = swept(result)
    return _side_by_side(result) if what is None else _swept(result, what)


def swept(result: StudyResult) -> Literal["block_size", "num_slots"] | None:
    """What differs between the runs of a scheme; None where there is one run of each."""
    configs = [run.config for run in result.results.values()]
    if len({c.block_size for c in configs if c.scheme == "paged"}) > 1:
        return "block_size"
    return "num_slots" if len({c.num_slots for c in configs}) > 1 else None


def over_time(result: StudyResult) -> Figure:
    """The memory of each run by kind, over time."""
    num_rows = (len(result.results) + 2) // 3
    figure = _figure(13, 0.6 + 1.9 * num_rows)
    _grid_over_time(figure, result)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(KINDS), fontsize=8, frameon=False)
    return figure


def _swept(result: StudyResult, what: str) -> Figure:
    """Figures against the block size, or the memory; a line for each scheme."""
    figure = _figure(13, 9)
    lines = _lines(result, what)
    for axes, (title, value) in zip(figure.subplots(3, 3).flat, SWEPT.items(), strict=True):
        try:
            points = {label: ([x for x, _ in line], [value(result.summaries[name]) for _, name in line]) for label, line in lines.items()}
        except (KeyError, TypeError):  # not measured
            axes.remove()
            continue
        _lines_of(axes, points, "block size" if what == "block_size" else "KV memory, thousands of tokens")
        axes.set_title(title, fontsize=9)
    if len(lines) > 1:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    return figure


def _lines(result: StudyResult, what: str) -> dict[str, list[tuple[float, str]]]:
    """(place on the axis, run) of each line, by its label."""
    lines: dict[str, list[tuple[float, str]]] = {}
    for name, run in result.results.items():
        other = f", {run.config.num_slots:,} tokens" if what == "block_size" and len(result.num_slots) > 1 else ""
        label = f"{run.config.scheme}{'+static' if run.config.batching == 'static' else ''}{other}"
        place = run.config.block_size if what == "block_size" else run.config.num_slots / 1000
        lines.setdefault(label, []).append((place, name))
    return lines


def _lines_of(axes: Axes, points: dict[str, tuple[list[float], list[float]]], below: str) -> None:
    for number, (label, (places, values)) in enumerate(points.items()):
        axes.plot(places, values, label=label, **_style(number, len(points)))
    places = sorted({place for line, _ in points.values() for place in line})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,.0f}" for place in places], fontsize=7)
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, 1.08 * max(max(values) for _, values in points.values()) or 1)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel(below, fontsize=8)
    axes.grid(alpha=0.25)


def _style(number: int, count: int) -> dict[str, Any]:
    """How a line is drawn so that those drawn later over the same points leave it visible: later ones are thinner, and dashed."""
    behind = (count - 1 - number) / max(1, count - 1)
    return {
        "linestyle": ("-", "--", "-.", ":")[number % 4],
        "linewidth": 1.4 + 3.6 * behind,
        "marker": "o",
        "markersize": 3 + 5 * behind,
    }


def _side_by_side(result: StudyResult) -> Figure:
    """Memory and speed of each run, and the memory of each over time."""
    runs = list(result.summaries)
    num_rows = (len(runs) + 2) // 3
    figure = _figure(13, 4.4 + 1.9 * num_rows)
    rows = figure.add_gridspec(2, 1, height_ratios=[4.4, 1.9 * num_rows])
    top, bottom = figure.add_subfigure(rows[0]), figure.add_subfigure(rows[1])
    memory, batch, speed = top.subplots(1, 3)
    pressed = any(s["memory"]["pressed_seconds"] for s in result.summaries.values())
    shares = [s["memory"]["pressed" if s["memory"]["pressed_seconds"] else "all"] for s in result.summaries.values()]
    _stack(memory, [_label(run) for run in runs], shares)
    _mark_shared(memory, [share["shared"] for share in shares])
    top.legend(*memory.get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS) + 1, fontsize=8, frameon=False)
    memory.set_title("KV memory" + (" while requests waited" if pressed else ""), fontsize=10)
    _bars(batch, runs, [s["batch"]["mean"] for s in result.summaries.values()], "requests in a batch, mean")
    _bars(speed, runs, [s["throughput"]["output_tokens_per_second"] for s in result.summaries.values()], "output tokens per second")
    _grid_over_time(bottom, result)
    return figure


def _grid_over_time(figure: Figure | SubFigure, result: StudyResult) -> None:
    """A panel for each run, three in a row."""
    runs = list(result.results)
    grid = figure.subplots((len(runs) + 2) // 3, min(3, len(runs)), squeeze=False, sharey=True, sharex=True)
    for axes, name in zip(grid.flat, runs, strict=False):
        _over_time(axes, name, result)
    for axes in list(grid.flat)[len(runs) :]:
        axes.set_axis_off()
    figure.supxlabel("seconds", fontsize=8)
    figure.supylabel("of the KV memory", fontsize=8)


def _label(name: str) -> str:
    return name.replace("_", " ").replace("+", "\n+ ")


def _stack(axes: Axes, names: list[str], rows: list[dict[str, float]]) -> None:
    places = range(len(names))
    below = [0.0] * len(names)
    for kind in KINDS:
        heights = [row.get(kind, 0.0) for row in rows]
        axes.bar(places, heights, bottom=below, color=COLOURS[kind], label=kind)
        for place, start, height in zip(places, below, heights, strict=True):
            if height >= 0.05 and kind != "free":
                dark = kind in ("used", "external")
                axes.text(
                    place, start + height / 2, f"{height:.0%}", ha="center", va="center", fontsize=6, color="white" if dark else "black"
                )
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"], fontsize=7)
    _name(axes, names)


def _mark_shared(axes: Axes, shares: list[float]) -> None:
    """A line across each bar: the slots that would be used beside it without sharing, up to all of the memory."""
    if any(shares):
        places = [place for place, share in enumerate(shares) if share]
        axes.hlines([min(1.0, shares[place]) for place in places], [p - 0.4 for p in places], [p + 0.4 for p in places],
                    colors="black", linestyles="dashed", label="shared, beside used")  # fmt: skip


def _bars(axes: Axes, names: list[str], heights: list[float], title: str) -> None:
    bars = axes.bar(range(len(names)), heights, color=COLOURS["used"])
    axes.bar_label(bars, [f"{height:,.0f}" if height >= 100 else f"{height:.3g}" for height in heights], fontsize=7)
    _name(axes, [_label(name) for name in names])
    axes.margins(y=0.12)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_title(title, fontsize=10)


def _name(axes: Axes, names: list[str]) -> None:
    """Names below bars, slanted where there are many."""
    many = len(names) > 4
    axes.set_xticks(range(len(names)), names, rotation=35 if many else 0, ha="right" if many else "center", fontsize=7)
    if many:
        axes.tick_params(axis="x", pad=0)


def _over_time(axes: Axes, name: str, result: StudyResult) -> None:
    moments = timeline(result.results[name])
    times = [moment.time for moment in moments]
    columns = [[moment.shares[kind] for moment in moments] for kind in KINDS]
    axes.stackplot(times, columns, colors=[COLOURS[kind] for kind in KINDS], labels=KINDS)
    if any(moment.shared for moment in moments):
        axes.plot(times, [moment.shared for moment in moments], color="black", linestyle="dashed", linewidth=0.8)
    axes.set_title(name.replace("_", " "), fontsize=8)
    axes.set_ylim(0, 1)
    axes.margins(x=0)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.tick_params(labelsize=7, labelbottom=True)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(NO_MATPLOTLIB) from None
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    check_figure(path)
    figure.savefig(path, dpi=150)
